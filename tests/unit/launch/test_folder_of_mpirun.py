"""The private folder of an mpirun, where it needs one.

Tests mpiddp/launch/supervise/mpirun.py.
python -m pytest tests/unit/launch/test_folder_of_mpirun.py
"""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from mpiddp.launch.supervise.mpirun import _private_folder
from mpiddp.paths import new_private_folder, remove_private_folder


@pytest.mark.parametrize(
    ("name", "is_taken"), [("short", True), ("with a blank", False), ("", False)]
)
def test_it_is_where_tmpdir_says_if_that_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_taken: bool
) -> None:
    """Every mpirun splits ssh's arguments at blanks."""
    parent = tmp_path / (name or "missing")
    if name:
        parent.mkdir()
    monkeypatch.setenv("TMPDIR", str(parent))
    with _private_folder(needed=True) as folder:
        assert Path(folder).parent == (parent if is_taken else Path("/tmp"))
        assert stat.S_IMODE(Path(folder).stat().st_mode) == 0o700
        Path(folder, "hosts").touch()
    assert not Path(folder).exists()


def test_no_folder_is_made_without_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with _private_folder(needed=False) as folder:
        assert (folder, list(tmp_path.iterdir())) == (".", [])


def test_what_a_killed_launcher_has_left_is_removed_and_that_of_a_living_one_is_not(tmp_path):
    code = (
        "import signal; from pathlib import Path; from mpiddp.paths import new_private_folder; "
        f"print(new_private_folder(Path({str(tmp_path)!r})), flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        own = new_private_folder(tmp_path)
        assert (theirs.exists(), own.exists()) == (True, True)
        other.kill()
        other.wait()
    remove_private_folder(new_private_folder(tmp_path))
    assert list(tmp_path.iterdir()) == [own]
    remove_private_folder(own)
