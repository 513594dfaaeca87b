"""A checkpoint folder is complete or absent, is verified when read, and survives failures.

Tests mpiddp/checkpoints/folder.py, mpiddp/files.py.
python -m pytest tests/integration/checkpoints/test_checkpoint_directory.py
"""

import hashlib
import json
import os
import pwd
import random
from pathlib import Path

import pytest

from mpiddp.checkpoints import folder as directory
from mpiddp.checkpoints.folder import BrokenCheckpoint
from mpiddp.errors import UserError
from mpiddp.files import read_limited, replace_file
from mpiddp.train.data import default_data_dir
from tests.support.errors import error

CONTENT = {"model.pt": random.Random(0).randbytes(5000), "state.json": b'{"step": 1}\n'}


def write(root: Path, step: int) -> Path:
    """Write the checkpoint of `step` into `root`."""
    final = root / directory.name_of_step(step)
    with directory.appearing(final) as new:
        for name, content in CONTENT.items():
            (new / name).write_bytes(content)
        directory.seal(new, {})
    return final


def complaint(folder: Path) -> str:
    """The damage that `verify` reports."""
    with pytest.raises(BrokenCheckpoint) as caught:
        directory.verify(folder)
    assert not directory.is_verified(folder)
    message = str(caught.value)
    assert message.startswith(f"checkpoint {folder.name}: ")
    return message.removeprefix(f"checkpoint {folder.name}: ")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path, 7)


def test_the_message_names_the_damage(folder):
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


def test_no_file_outside_of_the_checkpoint_is_touched(folder):
    """Not even a pipe, which would block the reader, and not before all names have been checked."""
    os.mkfifo(folder.parent / "pipe")
    entries = {"pipe": ENTRY, "../pipe": ENTRY}
    craft(folder, json.dumps(entries).encode())
    assert complaint(folder).startswith('manifest.json lists "../pipe"')


def test_checkpoints_are_listed_by_step(tmp_path):
    folders = [write(tmp_path, step) for step in (900, 1000, 123_456_789, 5)]
    (tmp_path / "step_5").mkdir()
    (tmp_path / "step_00000006.bak").mkdir()
    (tmp_path / "step_00000008").write_text("a file")
    assert directory.list_steps(tmp_path) == [folders[i] for i in (3, 0, 1, 2)]
    assert directory.list_steps(tmp_path / "none") == []
    with pytest.raises(ValueError, match="step_5 is not named"):
        directory.step_of(tmp_path / "step_5")


def test_no_home_folder_for_data(monkeypatch):
    monkeypatch.delenv("MPIDDP_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # as in a container
    values = ("HOME", "--data-dir DIR", "MPIDDP_DATA=DIR")
    with pytest.raises(UserError, match=error("folder for", *values)):
        default_data_dir()


def test_a_read_always_ends(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"1234")
    assert read_limited(tmp_path / "file", 4) == b"1234"
    for path, limit in ((tmp_path / "pipe", 4), (Path("/dev/zero"), 4), (tmp_path / "file", 3)):
        with pytest.raises(OSError, match=r"not a regular file|larger than 3 bytes"):
            read_limited(path, limit)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    replace_file(tmp_path / "file", b"new")
    (tmp_path / "folder/in").mkdir(parents=True)
    with pytest.raises(OSError, match="irectory") as caught:
        replace_file(tmp_path / "folder", b"new")
    assert caught.value.filename == str(tmp_path / "folder")
    assert {path.name for path in tmp_path.iterdir()} == {"file", "folder"}
    assert (tmp_path / "file").read_bytes() == b"new"
