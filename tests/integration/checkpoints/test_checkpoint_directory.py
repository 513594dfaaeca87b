"""A checkpoint folder is complete or absent, is verified when read, and survives failures.

Tests mpiddp/checkpoints/folder.py, mpiddp/files.py.
"""

import hashlib
import json
import os
import random
from pathlib import Path

import pytest

from mpiddp.checkpoints import folder as directory
from mpiddp.checkpoints.folder import BrokenCheckpoint
from mpiddp.files import read_limited

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


def test_a_read_always_ends(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"1234")
    assert read_limited(tmp_path / "file", 4) == b"1234"
    for path, limit in ((tmp_path / "pipe", 4), (Path("/dev/zero"), 4), (tmp_path / "file", 3)):
        with pytest.raises(OSError, match=r"not a regular file|larger than 3 bytes"):
            read_limited(path, limit)
