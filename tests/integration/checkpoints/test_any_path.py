"""A path may be a pipe, or in a folder that has been removed.

Tests mpiddp/paths.py, mpiddp/cli.py.
python -m pytest tests/integration/checkpoints/test_any_path.py
"""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from mpiddp.errors import UserError
from mpiddp.paths import read_limited
from mpiddp.train.datasets import default_data_dir
from tests.support.errors import error


def test_no_home_folder_for_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPIDDP_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # as in a container
    values = ("HOME", "--data-dir DIR", "MPIDDP_DATA=DIR")
    with pytest.raises(UserError, match=error("folder for", *values)):
        default_data_dir()


def test_a_read_always_ends(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"1234")
    assert read_limited(tmp_path / "file", 4) == b"1234"
    for path, limit in ((tmp_path / "pipe", 4), (Path("/dev/zero"), 4), (tmp_path / "file", 3)):
        with pytest.raises(OSError, match=r"not a regular file|larger than 3 bytes"):
            read_limited(path, limit)
