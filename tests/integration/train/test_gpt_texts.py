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

from tests.support.ranks import ROOT, run_command
from tests.support.training import contents, records, unequal

SCRIPT = str(ROOT / "examples/gpt/train.py")
TINY = ("--layers=2", "--width=32", "--heads=2", "--context=32", "--batch-size=8")
DRAWN = random.Random(0)
TEXT = "".join(f"{DRAWN.randrange(10)} is {DRAWN.choice(['odd', 'even'])}.\n" for _ in range(400))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_mixed_precision_learns_and_resumes(tmp_path: Path, precision: str) -> None:
    """float16 with a GradScaler, whose scale is saved."""
    (tmp_path / "text").write_text(TEXT)
    first = [sys.executable, SCRIPT, "--text=text", "--out=run", *TINY]
    first += [f"--precision={precision}", "--steps=100", "--save-every=60"]
    done = run_command(first, tmp_path)
    assert done.returncode == 0, done.stderr
    end = contents(tmp_path / "run", 100)
    assert bool(end["scaler"]) == (precision == "float16")
    assert all(each.dtype == torch.float32 for each in end["model"].values())
    shutil.rmtree(tmp_path / "run/checkpoints/step_00000100")
    done = run_command(first, tmp_path)
    assert done.returncode == 0, done.stderr
    assert unequal(contents(tmp_path / "run", 100), end) == []
    assert records(tmp_path / "run")[-1]["loss"] < 1.5
