"""The texts and batches of examples/gpt, and mixed precision in one process.

Tests examples/gpt/train.py, data.py, options.py and curve.py.
python -m pytest tests/integration/train/test_gpt_texts.py
"""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path

import pytest
import torch

from tests.support.gpt import TINY, run, weights
from tests.support.ranks import ROOT
from tests.support.training import records, unequal

SCRIPT = str(ROOT / "examples/gpt/train.py")


DRAWN = random.Random(0)


TEXT = "".join(f"{DRAWN.randrange(10)} is {DRAWN.choice(['odd', 'even'])}.\n" for _ in range(400))


def command(launcher: list[str], *options: str) -> list[str]:
    return [*launcher, SCRIPT, "--text=text", "--out=run", *TINY, *options]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_mixed_precision_learns_and_resumes(tmp_path: Path, precision: str) -> None:
    """float16 with a GradScaler, whose scale is saved."""
    (tmp_path / "text").write_text(TEXT)
    first = command([sys.executable], f"--precision={precision}", "--steps=100", "--save-every=60")
    done = run(first, tmp_path)
    assert done.returncode == 0, done.stderr
    end = weights(tmp_path / "run", 100)
    assert bool(end["scaler"]) == (precision == "float16")
    assert all(each.dtype == torch.float32 for each in end["model"].values())
    shutil.rmtree(tmp_path / "run/checkpoints/step_00000100")
    done = run(first, tmp_path)
    assert done.returncode == 0, done.stderr
    assert unequal(weights(tmp_path / "run", 100), end) == []
    assert records(tmp_path / "run")[-1]["loss"] < 1.5
