"""A checkpoint folder is complete or absent, is verified when read, and survives failures.

Tests mpiddp/checkpoints/folder.py.
python -m pytest tests/integration/checkpoints/test_checkpoint_directory.py
"""

import errno
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpiddp.checkpoints import folder as directory
from mpiddp.checkpoints.folder import BrokenCheckpoint
from tests.support import checkpoint_folders

CONTENT = {"model.pt": random.Random(0).randbytes(5000), "state.json": b'{"step": 1}\n'}


def write_files(folder: Path) -> None:
    for name, content in CONTENT.items():
        (folder / name).write_bytes(content)


def complaint(folder: Path) -> str:
    """The damage that `verify` reports."""
    with pytest.raises(BrokenCheckpoint) as caught:
        directory.verify(folder)
    assert not directory.is_verified(folder)
    message = str(caught.value)
    assert message.startswith(f"checkpoint {folder.name}: ")
    return message.removeprefix(f"checkpoint {folder.name}: ")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Writing


def test_a_file_system_without_fsync_of_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SMB and some of FUSE refuse it. The files are flushed all the same."""
    flushed = []

    def fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.is_dir():
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        flushed.append(path.name)

    monkeypatch.setattr(os, "fsync", fsync)
    folder = checkpoint_folders.write(tmp_path / "checkpoints", 1, write_files)
    assert directory.is_verified(folder)
    assert {*CONTENT, "manifest.json"} <= set(flushed)


def test_a_checkpoint_contains_its_files_and_a_manifest(tmp_path: Path) -> None:
    folder = checkpoint_folders.write(tmp_path / "checkpoints", 12, write_files)
    assert folder == tmp_path / "checkpoints" / "step_00000012"
    assert names(folder.parent) == ["step_00000012"]
    assert names(folder) == ["COMPLETE", "manifest.json", "model.pt", "state.json"]
    assert (folder / "model.pt").read_bytes() == CONTENT["model.pt"]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert {name: entry["bytes"] for name, entry in manifest.items()} == {
        "model.pt": 5000,
        "state.json": 12,
    }
    directory.verify(folder)
    assert directory.step_of(folder) == 12


def test_a_broken_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    folder = checkpoint_folders.write(tmp_path, 1, write_files)
    (folder / "model.pt").write_bytes(b"broken")
    checkpoint_folders.write(tmp_path, 1, write_files)
    directory.verify(folder)
    assert names(tmp_path) == ["step_00000001"]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    kept = checkpoint_folders.write(tmp_path, 1, write_files)

    def fail(folder: Path) -> None:
        write_files(folder)
        raise OSError(28, "No space left on device")

    for step in (1, 2):
        if step == 1:
            (kept / "state.json").unlink()  # broken, so it would be replaced
        with pytest.raises(OSError, match="No space left"):
            checkpoint_folders.write(tmp_path, step, fail)
        assert names(tmp_path) == ["step_00000001"]


HANGS_WHILE_WRITING = """
import sys, time
from pathlib import Path
from mpiddp.checkpoints import folder as directory
from tests.support import checkpoint_folders

def write_files(folder):
    (folder / "model.pt").write_bytes(b"half")
    print("writing", flush=True)
    time.sleep(60)

checkpoint_folders.write(Path(sys.argv[1]), 2, write_files)
"""


def test_set_aside_renames_newer_checkpoints(tmp_path: Path) -> None:
    for _ in range(2):
        for step in (1, 2, 3):
            checkpoint_folders.write(tmp_path, step, write_files)
        moved = directory.set_aside(tmp_path, 1)
    assert names(tmp_path) == [
        "step_00000001",
        *(f"step_0000000{step}.old-{turn}" for step in (2, 3) for turn in (1, 2)),
    ]
    assert [folder.name for folder in moved] == ["step_00000002.old-2", "step_00000003.old-2"]
    assert directory.list_steps(tmp_path) == [tmp_path / "step_00000001"]


def test_a_kill_during_a_write_leaves_the_old_checkpoint_valid(tmp_path: Path) -> None:
    old = checkpoint_folders.write(tmp_path, 1, write_files)
    writer = subprocess.Popen(
        [sys.executable, "-c", HANGS_WHILE_WRITING, str(tmp_path)], stdout=subprocess.PIPE
    )
    with writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"writing\n"
        writer.kill()
    assert directory.list_steps(tmp_path) == [old]
    assert checkpoint_folders.survey(tmp_path) == (old, [])
    assert len(names(tmp_path)) == 2  # with the unfinished folder
    directory.remove_leftovers(tmp_path)
    checkpoint_folders.write(tmp_path, 2, write_files)
    assert names(tmp_path) == ["step_00000001", "step_00000002"]


WRITES_FOREVER = """
import sys
from itertools import count
from pathlib import Path
from mpiddp.checkpoints import folder as directory
from tests.support import checkpoint_folders

root = Path(sys.argv[1])

def write_files(folder):
    (folder / "model.pt").write_bytes(bytes([step % 256]) * 9999)

for step in count(1):
    checkpoint_folders.write(root, step, write_files)
    directory.prune(root, 2, is_good=directory.is_intact)
    print(step, flush=True)
"""


def test_a_kill_at_any_moment_leaves_a_valid_checkpoint(tmp_path: Path) -> None:
    """After each kill, another writer starts in the same folder, as after a restart."""
    draw = random.Random(0)
    for _ in range(8):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITES_FOREVER, str(tmp_path)], stdout=subprocess.PIPE
        )
        with writer:
            assert writer.stdout is not None
            written = [int(writer.stdout.readline()) for _ in range(3)]
            time.sleep(draw.uniform(0, 0.02))
            writer.send_signal(signal.SIGKILL)
        for folder in directory.list_steps(tmp_path):
            directory.verify(folder)
        newest, complaints = checkpoint_folders.survey(tmp_path)
        assert newest is not None
        assert complaints == []
        assert directory.step_of(newest) >= written[-1]


# Reading


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoint_folders.write(tmp_path, 7, write_files)


def test_the_message_names_the_damage(folder: Path) -> None:
    model = folder / "model.pt"
    model.write_bytes(bytes(4999))
    assert complaint(folder) == "model.pt has 4999 bytes instead of 5000"
    model.write_bytes(bytes(5000))
    assert complaint(folder) == "model.pt does not match its SHA-256"
    model.unlink()
    assert complaint(folder) == "model.pt is missing"
    (folder / "manifest.json").write_text("{}")
    assert complaint(folder) == "manifest.json does not match its SHA-256"
    (folder / "COMPLETE").unlink()
    assert complaint(folder) == "the save was never completed"


def craft(folder: Path, manifest: bytes) -> None:
    """Give the checkpoint another manifest, with the right SHA-256 of it."""
    (folder / "manifest.json").write_bytes(manifest)
    (folder / "COMPLETE").write_text(hashlib.sha256(manifest).hexdigest())


ENTRY = {"bytes": 13, "sha256": hashlib.sha256(CONTENT["state.json"]).hexdigest()}


def test_no_file_outside_of_the_checkpoint_is_touched(folder: Path) -> None:
    """Not even a pipe, which would block the reader, and not before all names have been checked."""
    os.mkfifo(folder.parent / "pipe")
    entries = {"pipe": ENTRY, "../pipe": ENTRY}
    craft(folder, json.dumps(entries).encode())
    assert complaint(folder).startswith('manifest.json lists "../pipe"')


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("/dev/zero", "not a regular file"),
        ("/proc/self/mem", "Input/output error"),  # as a bad sector
        ("COMPLETE", "Too many levels of symbolic links"),
    ],
)
def test_the_reason_why_a_file_cannot_be_read(folder: Path, target: str, reason: str) -> None:
    (folder / "COMPLETE").unlink()
    (folder / "COMPLETE").symlink_to(target)
    assert complaint(folder) == f"COMPLETE cannot be read: {reason}"


@pytest.mark.parametrize("manifest", [b"", b"\xff", b"[" * 100_000, b"[]", b'{"state.json": 1}'])
def test_a_manifest_of_another_program_is_refused(folder: Path, manifest: bytes) -> None:
    craft(folder, manifest)
    assert complaint(folder) == "manifest.json is not a table of files"


# Several checkpoints
def write_several(root: Path, *steps: int) -> list[Path]:
    return [checkpoint_folders.write(root, step, write_files) for step in steps]


def test_checkpoints_are_listed_by_step(tmp_path: Path) -> None:
    folders = write_several(tmp_path, 900, 1000, 123_456_789, 5)
    (tmp_path / "step_5").mkdir()
    (tmp_path / "step_00000006.bak").mkdir()
    (tmp_path / "step_00000008").write_text("a file")
    assert directory.list_steps(tmp_path) == [folders[i] for i in (3, 0, 1, 2)]
    assert directory.list_steps(tmp_path / "none") == []
    with pytest.raises(ValueError, match="step_5 is not named"):
        directory.step_of(tmp_path / "step_5")


def test_prune_keeps_the_newest_complete_ones(tmp_path: Path) -> None:
    folders = write_several(tmp_path, 1, 2, 3, 4, 5)
    (folders[4] / "COMPLETE").unlink()
    assert directory.prune(tmp_path, 2, is_good=directory.is_intact) == [folders[1], folders[0]]
    assert directory.list_steps(tmp_path) == folders[2:]
    assert names(tmp_path) == [folder.name for folder in folders[2:]]
    assert directory.prune(tmp_path, 2, is_good=directory.is_intact) == []
