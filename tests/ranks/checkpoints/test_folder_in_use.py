"""A training into the folder of a running one is refused.

Tests mpiddp/checkpoints/run.py.
python -m pytest tests/ranks/checkpoints/test_folder_in_use.py
"""

from __future__ import annotations

import re
from pathlib import Path

from mpiddp.checkpoints.run import RunDir
from tests.support.errors import error
from tests.support.owners import owning
from tests.support.ranks import mpiddp

TRAIN = ("-m", "mpiddp", "train", "--use-syn", "--arch=resnet20", "--batch-size=2", "--epochs=1")


def test_a_training_into_the_folder_of_a_running_one_is_refused(tmp_path: Path) -> None:
    with owning(RunDir(tmp_path), "first"):
        done = mpiddp("train", *TRAIN[3:], "--steps-per-epoch=2", "--out", str(tmp_path))
    assert done.returncode == 2, done.stderr
    in_use = error("Wait for", f"{tmp_path}: ", "the process ")
    assert re.search(in_use, done.stderr), done.stderr
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == []


def test_a_training_that_is_refused_gives_the_folder_up(tmp_path: Path) -> None:
    """Else another host would wait for 60 s, whether its owner is alive."""
    (tmp_path / "config.json").mkdir()
    done = mpiddp("train", *TRAIN[3:], "--steps-per-epoch=2", "--out", str(tmp_path))
    assert done.returncode == 2
    sentence = error("Name another folder", f"{tmp_path} ", "Is a directory")
    assert re.fullmatch(f"{sentence}\n", done.stderr), done.stderr
    assert not (tmp_path / "owner.json").exists()
