"""What a disk or a file server does to a job that has started is no bad input: the exit code is 1, not 2.

Tests mpiddp/paths.py, mpiddp/checkpoints/find.py and contents.py. A link to /proc/self/mem is a file that
cannot be read (EIO), as on a bad sector.
python -m pytest tests/test_failing_disk.py
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from mpiddp.checkpoints import directory
from mpiddp.checkpoints.contents import facts_of, read
from mpiddp.checkpoints.run_dir import RunDir, unwritable
from mpiddp.checkpoints.shards import Chunk, SavedTensor, ShardFiles
from mpiddp.checkpoints.tensor_file import Unreadable, load_tensors, read_tensors
from mpiddp.errors import JobFailed, UserError
from mpiddp.hosts.hostfile import read_hostfile
from mpiddp.protocol.variables import RESTART_COUNT
from mpiddp.train.data import cifar10_files
from mpiddp.train.data.datasets import DATASETS, MNIST_FILES
from mpiddp.train.engine import load_weights
from mpiddp.train.opening import load
from tests.ranks import mpiddp

BAD_SECTOR = Path("/proc/self/mem")
EIO = os.strerror(errno.EIO)
SHARD = "shard_00000.pt"
TENSOR = SavedTensor((1,), "float32", (Chunk((0,), (1,), 0),))
TRAIN = ("train", "--use-syn", "--arch=resnet20", "--batch-size=2", "--steps-per-epoch=1")


def test_a_read_error_within_torch_load_is_that_of_the_disk(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=EIO):
        load_tensors(BAD_SECTOR)
    (tmp_path / "file").write_bytes(b"no tensors")
    with pytest.raises(Unreadable):
        load_tensors(tmp_path / "file")


def test_a_hostfile_on_a_disk_that_fails() -> None:
    with pytest.raises(JobFailed, match=rf"^{BAD_SECTOR} cannot be read: {EIO}\.$"):
        read_hostfile(BAD_SECTOR)
    ran = mpiddp("launch", "--hostfile", str(BAD_SECTOR), "--dry-run", "-m", "platform")
    assert (ran.returncode, ran.stderr) == (1, f"{BAD_SECTOR} cannot be read: {EIO}.\n")


def _shards(folder: Path) -> object:
    return ShardFiles({'["a"]': TENSOR}, {SHARD: folder / SHARD}).read({'["a"]': None})


def _read(folder: Path, broken: str) -> object:
    """Read a checkpoint whose other files are as they should be."""
    (folder / "good").mkdir(exist_ok=True)
    files = {name: folder / "good" / name for name in ("state.json", "model.pt", "ranks.pt")}
    files["state.json"].write_text(facts_of(1, 1, ["model"], {}))
    torch.save({}, files["model.pt"])
    torch.save([], files["ranks.pt"])
    return read({**files, broken: folder / broken})


@pytest.mark.parametrize(
    ("file", "reads"),
    [
        ("state.json", lambda folder: _read(folder, "state.json")),
        ("model.pt", lambda folder: _read(folder, "model.pt")),
        ("ranks.pt", lambda folder: _read(folder, "ranks.pt")),
        ("shards.json", lambda folder: _read(folder, "shards.json")),
        ("model.pt", lambda folder: read_tensors(folder / "model.pt")),
        (SHARD, _shards),
        ("weights", lambda folder: load_weights(nn.Linear(1, 1), folder / "weights")),
    ],
)
def test_a_file_on_a_disk_that_fails_is_no_bad_input(
    tmp_path: Path, file: str, reads: Callable[[Path], object]
) -> None:
    (tmp_path / file).symlink_to(BAD_SECTOR)
    with pytest.raises(JobFailed, match=EIO):
        reads(tmp_path)
    (tmp_path / file).unlink()
    with pytest.raises(UserError):  # it is missing
        reads(tmp_path)


def test_data_on_a_disk_that_fails_is_no_bad_input(tmp_path: Path) -> None:
    for name in (*MNIST_FILES, *cifar10_files.PY):
        (tmp_path / name).symlink_to(BAD_SECTOR)
    for dataset in ("fashion-mnist", "cifar10"):
        with pytest.raises(JobFailed, match=EIO):
            load(DATASETS[dataset], tmp_path)


def _unreadable_checkpoint(out: Path) -> Path:
    folder = directory.write(
        RunDir(out).checkpoints, 7, lambda f: torch.save({}, f / "model.pt") or None
    )
    (folder / "COMPLETE").unlink()
    (folder / "COMPLETE").symlink_to(BAD_SECTOR)
    return folder


@pytest.mark.parametrize("resume", ["auto", "{folder}", "{out}", "never"])
def test_a_run_whose_checkpoints_cannot_be_read_now_may_be_restarted(
    tmp_path: Path, resume: str
) -> None:
    """It neither starts anew nor says that there is no checkpoint."""
    out = tmp_path / "out"
    folder = _unreadable_checkpoint(out)
    option = f"--resume={resume.format(folder=folder, out=out)}".split()
    attempt = {RESTART_COUNT: "1"} if resume == "never" else {}
    done = mpiddp(*TRAIN, "--out", str(out), *option, **attempt)
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1].endswith(
        f"checkpoint step_00000007: COMPLETE cannot be read: {EIO}."
    )


def test_a_disk_that_becomes_read_only_under_a_run_is_no_wrong_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, error = RunDir(tmp_path), OSError(errno.EROFS, os.strerror(errno.EROFS))
    assert isinstance(unwritable(run, error), UserError)
    monkeypatch.setenv(RESTART_COUNT, "1")
    assert isinstance(unwritable(run, error), JobFailed)
    monkeypatch.delenv(RESTART_COUNT)
    run.metrics.touch()
    assert isinstance(unwritable(run, error), JobFailed)
