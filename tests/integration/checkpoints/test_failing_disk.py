"""What a disk or a file server does to a job that has started is no bad input: the exit code is 1, not 2.
Files of another program are.

Tests mpiddp/paths.py, mpiddp/checkpoints/resume.py, contents.py, legacy.py, main.py and shards.py. A link to
/proc/self/mem is a file that cannot be read (EIO), as on a bad sector.
python -m pytest tests/integration/checkpoints/test_failing_disk.py
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from mpiddp.checkpoints import directory
from mpiddp.checkpoints.contents import Contents, export, facts_of, read, write_files
from mpiddp.checkpoints.ranks import FileSystems, Ranks
from mpiddp.checkpoints.resume import _listing, newest
from mpiddp.checkpoints.run import Run
from mpiddp.checkpoints.run_dir import RunDir, unwritable
from mpiddp.checkpoints.shards import Chunk, SavedTensor, ShardFiles
from mpiddp.checkpoints.state import Unreadable, load_tensors, read_tensors
from mpiddp.cli import main
from mpiddp.errors import JobFailed, UserError
from mpiddp.protocol.variables import RESTART_COUNT
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.train.data import cifar10_files
from mpiddp.train.data.datasets import DATASETS, MNIST_FILES
from mpiddp.train.engine import load_weights
from mpiddp.train.opening import load
from mpiddp.world import World
from tests.support.errors import error

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
        ("cannot be read", "state.json", lambda folder: _read(folder, "state.json")),
        ("cannot be read", "model.pt", lambda folder: _read(folder, "model.pt")),
        ("cannot be read", "ranks.pt", lambda folder: _read(folder, "ranks.pt")),
        ("cannot be read", "shards.json", lambda folder: _read(folder, "shards.json")),
        ("cannot be read", "model.pt", lambda folder: read_tensors(folder / "model.pt")),
        ("cannot be read", SHARD, _shards),
        (
            "--weights",
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
    for dataset, id in (("fashion-mnist", "cannot be read"), ("cifar10", ":")):
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

    check(UserError, "Name another folder")
    monkeypatch.setenv(RESTART_COUNT, "1")
    check(JobFailed, "cannot be written")
    monkeypatch.delenv(RESTART_COUNT)
    run.metrics.touch()
    check(JobFailed, "cannot be written")


# Exports, and what a verified checkpoint lists


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    contents = Contents(1, {"model": {}}, [], {})
    return directory.write(tmp_path / "checkpoints", 1, lambda new: write_files(new, contents))


def test_an_export_from_a_disk_that_fails(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "whole"
    (saved / "COMPLETE").unlink()
    (saved / "COMPLETE").symlink_to(BAD_SECTOR)
    values = (f"{saved}: ", "COMPLETE ", f"{EIO}.")
    with pytest.raises(JobFailed, match=rf"^{error(':', *values)}$"):
        export(saved, out)
    assert not out.exists()


def test_an_export_to_where_no_folder_can_be(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "file" / "whole"
    out.parent.touch()
    sentence = error("cannot be written", f"{out} ", os.strerror(errno.EEXIST))
    with pytest.raises(UserError, match=rf"^{sentence}$"):
        export(saved, out)


def test_an_export_of_a_run_whose_checkpoints_are_all_broken(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(saved, saved.with_name("step_00000002"))
    for folder in directory.list_steps(saved.parent):
        (folder / "model.pt").write_bytes(b"broken")
    out = tmp_path / "whole"
    assert main(["checkpoints", "export", str(tmp_path), str(out)]) == 2
    printed = capsys.readouterr()
    sentence = error("no verified", f"{tmp_path} ")
    assert (printed.out, bool(re.fullmatch(f"{sentence}\n", printed.err))) == ("", True), printed
    assert not out.exists()


def test_a_disk_that_fails_after_the_checkpoint_was_verified(saved: Path) -> None:
    assert directory.is_verified(saved)
    (saved / "manifest.json").unlink()
    (saved / "manifest.json").symlink_to(BAD_SECTOR)
    values = (f"{saved}: ", "manifest.json ", f"{EIO}.")
    with pytest.raises(JobFailed, match=rf"^{error(':', *values)}$"):
        _listing(saved)


# Files of another program


def test_a_table_of_shards_that_lists_no_file(tmp_path: Path) -> None:
    run = RunDir(tmp_path)

    def write_index(new: Path) -> None:
        (new / "shards.json").write_text("{}")

    folder = directory.write(run.checkpoints, 1, write_index)
    directory.verify(folder)
    ranks = Ranks(Coordinator(World(0, 1, 0, 1), None), None)
    with pytest.raises(UserError, match=rf"^{error(':', f'{folder}: ', 'shards.json ')}$"):
        newest(Run(run, ranks, FileSystems((0,)), None))


@pytest.mark.parametrize("facts", ["{}", '{"progress": {}}', '{"progress": 1}'])
@pytest.mark.parametrize("files", [["ranks.pt"], ["ranks.pt", "model.pt", "trainer.pt"], []])
def test_a_checkpoint_of_no_version(tmp_path: Path, facts: str, files: list[str]) -> None:
    (tmp_path / "state.json").write_text(facts)
    for name in files:
        torch.save([], tmp_path / name)
    sentence = error("files have", f"{tmp_path} ")
    with pytest.raises(UserError, match=rf"^{sentence}$"):
        read({path.name: path for path in tmp_path.iterdir()})


@pytest.mark.parametrize("facts", ["", "{", "[]", "1"])
def test_a_checkpoint_of_another_program(tmp_path: Path, facts: str) -> None:
    (tmp_path / "state.json").write_text(facts)
    with pytest.raises(UserError, match=error("or foreign", f"{tmp_path} ", "state.json ")):
        read({"state.json": tmp_path / "state.json"})


def test_a_file_of_shards_without_names(tmp_path: Path) -> None:
    torch.save([torch.zeros(1)], tmp_path / SHARD)
    with pytest.raises(UserError, match=rf"^{error('has other', f'{tmp_path / SHARD} ')}$"):
        _shards(tmp_path)
