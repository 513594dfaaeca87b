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

import mpiddp
from examples.gpt.data import batch_of_step, load_text
from tests.support.gpt import TINY, bad_texts, run, weights
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


def test_the_batches_of_a_step_do_not_depend_on_the_past() -> None:
    tokens = torch.arange(500)
    inputs, targets = batch_of_step(tokens, 7, 4, 10, seed=3)
    again, _ = batch_of_step(tokens, 7, 4, 10, seed=3)
    assert torch.equal(inputs, again)
    assert torch.equal(targets, inputs + 1)
    assert inputs.shape == (4, 10)
    assert not torch.equal(inputs, batch_of_step(tokens, 8, 4, 10, seed=3)[0])
    assert not torch.equal(inputs, batch_of_step(tokens, 7, 4, 10, seed=4)[0])


def test_a_text_as_numbers(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("zaß𝄞" * 100)
    text = load_text(str(file), context=8)
    assert text.characters == "azß𝄞"
    assert (len(text.train), len(text.validation)) == (360, 40)
    assert text.decode(torch.cat([text.train, text.validation])) == "zaß𝄞" * 100
    assert text.encode("𝄞a").tolist() == [3, 0]
    shipped = load_text(None, context=128)
    assert len(shipped.train) > 9 * len(shipped.validation) - 10
    assert len(shipped.train) > 300_000


def test_a_bad_text_is_one_sentence(tmp_path: Path) -> None:
    for name, sentence in bad_texts(tmp_path).items():
        with pytest.raises(mpiddp.UserError) as found:
            load_text(str(tmp_path / name), context=128)
        assert str(found.value).startswith(f"--text {tmp_path / name}{sentence}")
        assert "\n" not in str(found.value)
    with pytest.raises(mpiddp.UserError, match=r"^--text /dev/zero is not a file\."):
        load_text("/dev/zero", context=128)
    (tmp_path / "enough").write_text("x" * 1290)
    assert len(load_text(str(tmp_path / "enough"), context=128).validation) == 129
