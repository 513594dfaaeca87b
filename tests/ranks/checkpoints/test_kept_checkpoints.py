"""The checkpoints that two ranks keep, and when they save.

Tests mpiddp/checkpoints/save.py.
python -m pytest tests/ranks/checkpoints/test_kept_checkpoints.py
"""

from __future__ import annotations

import shutil
from pathlib import Path

from mpiddp.checkpoints import folder as directory
from tests.support.training import Command, train


def test_keep_counts_only_verified_checkpoints(tmp_path: Path) -> None:
    """A resumed run finds a damaged checkpoint among its older ones."""
    options: Command = [
        "--use-syn", "--arch=resnet20", "--batch-size=4", "--epochs=1", "--steps-per-epoch=4",
        "--save-every=1", "--keep=2", "--out", tmp_path / "out",
    ]  # fmt: skip
    assert train(1, *options, "--stop-at-step=2").returncode == 75
    root = tmp_path / "out" / "checkpoints"
    # It has the right size, so comparing sizes would count it.
    shutil.copytree(root / "step_00000002", root / "step_00000003")
    shutil.rmtree(root / "step_00000002")
    model = root / "step_00000003" / "model.pt"
    model.write_bytes(bytes(model.stat().st_size))
    job = train(1, *options, "--stop-at-step=2")
    assert (
        "step_00000003: model.pt does not match its SHA-256; resuming from step_00000001 (2 steps"
        in job.stdout
    )
    assert [directory.step_of(folder) for folder in directory.list_steps(root)] == [1, 2, 3]


def test_timed_saves_of_two_ranks_are_at_the_same_steps(tmp_path: Path) -> None:
    job = train(
        2, "--use-syn", "--arch=resnet20", "--batch-size=4", "--epochs=1", "--steps-per-epoch=60",
        "--save-every=0.05s", "--log-every=1000", "--out", tmp_path / "out",
    )  # fmt: skip
    assert job.returncode == 0, job.stderr
    folders = directory.list_steps(tmp_path / "out" / "checkpoints")
    assert [directory.step_of(folder) for folder in folders][-1] == 60
    assert len(folders) == 2
    for folder in folders:
        directory.verify(folder)
