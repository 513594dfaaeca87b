"""The time that each command of a drill gets, and the folder of its runs.

Tests mpiddp/drill/main.py.
python -m pytest tests/unit/drill/test_drill_budget.py
"""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest

from mpiddp.drill.main import _limit_s, _new_folder
from mpiddp.errors import UserError
from tests.support.errors import error


@pytest.mark.parametrize(
    ("left_s", "faults", "undisturbed_s", "limit_s"),
    [
        (3600, 12, 10, 110),  # a command that hangs leaves most of its share to others
        (3600, 12, 120, 300),  # a share
        (600, 12, 120, 270),  # more than a share, as less would be of no use
        (200, 12, 120, 200),
    ],
)
def test_the_time_of_a_command(
    left_s: float, faults: int, undisturbed_s: float, limit_s: float
) -> None:
    assert _limit_s(left_s, faults, undisturbed_s) == limit_s


@pytest.mark.parametrize(("named", "reason"), [("file", errno.EEXIST), ("file/new", errno.ENOTDIR)])
def test_a_folder_that_cannot_be_made(
    named: str, reason: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    values = (f"{tmp_path / named} ", f": {os.strerror(reason)}. ", ": --work DIR ")
    with pytest.raises(UserError, match=rf"^{error('folder: --work', *values)}$"):
        _new_folder(named, has_hosts=False)


@pytest.mark.parametrize("has_hosts", [False, True])
def test_a_place_for_the_folder_that_cannot_be_written(
    has_hosts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No folder can be made in /proc, not even by root."""
    monkeypatch.chdir("/proc" if has_hosts else tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path) if has_hosts else "/proc")
    with pytest.raises(UserError, match=error("folder: --work", "/proc ", ": --work DIR ")):
        _new_folder(None, has_hosts=has_hosts)
