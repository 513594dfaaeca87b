"""What a stranger may put into a checkpoint folder blocks no reader, and leads out of no folder.

Tests mpiddp/checkpoints/folder.py, mpiddp/files.py.
"""

import hashlib
import json
import os
from pathlib import Path

import pytest

from mpiddp.checkpoints import folder as directory
from mpiddp.checkpoints.folder import BrokenCheckpoint
from mpiddp.files import read_limited


def test_no_file_outside_of_the_checkpoint_is_touched(tmp_path):
    """Not even a pipe, which would block the reader, and not before all names have been checked."""
    with directory.appearing(tmp_path / "step_00000007") as new:
        directory.seal(new, {})
    os.mkfifo(tmp_path / "pipe")
    entry = {"bytes": 13, "sha256": "0" * 64}
    manifest = json.dumps({"pipe": entry, "../pipe": entry}).encode()
    (tmp_path / "step_00000007/manifest.json").write_bytes(manifest)
    (tmp_path / "step_00000007/COMPLETE").write_text(hashlib.sha256(manifest).hexdigest())
    with pytest.raises(BrokenCheckpoint, match=r'step_00000007: manifest.json lists "\.\./pipe"'):
        directory.verify(tmp_path / "step_00000007")
    assert not directory.is_verified(tmp_path / "step_00000007")


def test_a_read_always_ends(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"1234")
    assert read_limited(tmp_path / "file", 4) == b"1234"
    for path, limit in ((tmp_path / "pipe", 4), (Path("/dev/zero"), 4), (tmp_path / "file", 3)):
        with pytest.raises(OSError, match=r"not a regular file|larger than 3 bytes"):
            read_limited(path, limit)
