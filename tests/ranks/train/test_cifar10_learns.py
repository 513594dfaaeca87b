"""A user's first training: CIFAR-10 with the defaults on 2 real ranks learns in 150 steps.

It takes about 20 s on two cores. Guessing would classify 10 % of the test images correctly.

Tests mpiddp/train/.
python -m pytest tests/ranks/train/test_cifar10_learns.py
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.data_cache import fetched_cifar10
from tests.support.ranks import mpirun
from tests.support.training import summary

ROWS = (
    *("data set", "arch", "ranks", "steps", "images/s", "step time", "time"),
    *("train loss", "test accuracy", "wall time", "run folder"),
)


@pytest.mark.slow
def test_150_steps_with_the_defaults_learn(tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = [f"--data-dir={fetched_cifar10()}", "--epochs=1", "--steps-per-epoch=150"]
    options.append(f"--out={run}")
    job = mpirun(2, "-m", "mpiddp", "train", *options, timeout_s=1800)
    assert job.returncode == 0, job.stderr

    lines = job.stdout.rpartition("\n\n")[2].splitlines()
    rows = {row: line[len(row) :].strip() for row in ROWS for line in lines if line.startswith(row)}
    assert (*rows,) == ROWS
    found = summary(run)
    accuracy = re.fullmatch(r"(\d+\.\d+)% of 10,000 images", rows["test accuracy"])
    assert accuracy is not None
    assert float(accuracy[1]) >= 40
    assert found["test_accuracy"] == pytest.approx(float(accuracy[1]) / 100, abs=0.00005)
    assert (found["test_images"], found["steps"], found["global_batch_size"]) == (10_000, 150, 128)
    assert (rows["data set"], rows["steps"]) == (found["dataset"], "150 of 128 images")
    assert rows["train loss"] == f"{found['train_loss']:.4f}"
    assert rows["images/s"] == f"{found['images_per_s']:,.0f} over all ranks"
    assert (found["world_size"], rows["run folder"]) == (2, str(run))
