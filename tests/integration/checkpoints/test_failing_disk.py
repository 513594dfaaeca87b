"""What a disk or a file server does to a job that has started is no bad input: the exit code is 1, not 2.

Tests mpiddp/paths.py, mpiddp/checkpoints/resume.py and contents.py. A link to /proc/self/mem is a file that
cannot be read (EIO), as on a bad sector.
python -m pytest tests/integration/checkpoints/test_failing_disk.py
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from mpiddp.checkpoints.contents import facts_of, read
from mpiddp.checkpoints.run_dir import RunDir, unwritable
from mpiddp.checkpoints.shards import Chunk, SavedTensor, ShardFiles
from mpiddp.checkpoints.state import Unreadable, load_tensors, read_tensors
from mpiddp.errors import JobFailed, UserError
from mpiddp.protocol.variables import RESTART_COUNT
from mpiddp.train.data import cifar10_files
from mpiddp.train.data.datasets import DATASETS, MNIST_FILES
from mpiddp.train.engine import load_weights
from mpiddp.train.opening import load
from tests.support.sentences import error

BAD_SECTOR = Path("/proc/self/mem")
EIO = os.strerror(errno.EIO)
SHARD = "shard_00000.pt"
TENSOR = SavedTensor((1,), "float32", (Chunk((0,), (1,), 0),))


def test_a_read_error_within_torch_load_is_that_of_the_disk(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=EIO):
        load_tensors(BAD_SECTOR)
    (tmp_path / "file").write_bytes(b"no tensors")
    with pytest.raises(Unreadable):
        load_tensors(tmp_path / "file")


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
    ("id", "file", "reads"),
    [
        ("file-unreadable", "state.json", lambda folder: _read(folder, "state.json")),
        ("file-unreadable", "model.pt", lambda folder: _read(folder, "model.pt")),
        ("file-unreadable", "ranks.pt", lambda folder: _read(folder, "ranks.pt")),
        ("file-unreadable", "shards.json", lambda folder: _read(folder, "shards.json")),
        ("file-unreadable", "model.pt", lambda folder: read_tensors(folder / "model.pt")),
        ("file-unreadable", SHARD, _shards),
        (
            "weights-missing",
            "weights",
            lambda folder: load_weights(nn.Linear(1, 1), folder / "weights"),
        ),
    ],
)
def test_a_file_on_a_disk_that_fails_is_no_bad_input(
    tmp_path: Path, id: str, file: str, reads: Callable[[Path], object]
) -> None:
    (tmp_path / file).symlink_to(BAD_SECTOR)
    with pytest.raises(JobFailed, match=error(id, f"{tmp_path / file}", EIO)):
        reads(tmp_path)
    (tmp_path / file).unlink()
    missing = os.strerror(errno.ENOENT)
    with pytest.raises(UserError, match=error(id, f"{tmp_path / file}", missing)):
        reads(tmp_path)


def test_data_on_a_disk_that_fails_is_no_bad_input(tmp_path: Path) -> None:
    for name in (*MNIST_FILES, *cifar10_files.PY):
        (tmp_path / name).symlink_to(BAD_SECTOR)
    for dataset, id in (("fashion-mnist", "file-unreadable"), ("cifar10", "cifar10-unreadable")):
        with pytest.raises(JobFailed, match=error(id, f"{tmp_path}/", EIO)):
            load(DATASETS[dataset], tmp_path)


def test_a_disk_that_becomes_read_only_under_a_run_is_no_wrong_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, read_only = RunDir(tmp_path), OSError(errno.EROFS, os.strerror(errno.EROFS))

    def check(kind: type[Exception], id: str) -> None:
        refused = unwritable(run, read_only)
        assert isinstance(refused, kind)
        assert re.fullmatch(error(id, f"{run} ", os.strerror(errno.EROFS)), str(refused))

    check(UserError, "run-unwritable")
    monkeypatch.setenv(RESTART_COUNT, "1")
    check(JobFailed, "run-disk")
    monkeypatch.delenv(RESTART_COUNT)
    run.metrics.touch()
    check(JobFailed, "run-disk")
