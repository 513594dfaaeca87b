"""A path may be a pipe, or in a folder that has been removed.

Tests mpiddp/paths.py, mpiddp/cli.py.
python -m pytest tests/integration/checkpoints/test_any_path.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mpiddp.errors import UserError
from mpiddp.paths import read_limited
from mpiddp.train.datasets import default_data_dir
from tests.support.errors import error
from tests.support.homes import leave_home
from tests.support.patience import PATIENCE_S
from tests.support.ranks import clean_env

TRAIN = ("--use-syn", "--arch=resnet20", "--batch-size=2", "--steps-per-epoch=1", "--epochs=1")


@pytest.mark.parametrize(
    "arguments", [("launch", "--dry-run", "-n", "1", "t.py"), ("train", *TRAIN)]
)
def test_a_working_folder_that_has_been_removed(arguments: tuple[str, ...], tmp_path: Path) -> None:
    code = "import os, sys; os.rmdir(os.getcwd()); os.execv(sys.executable, sys.argv[1:])"
    command = [sys.executable, "-c", code, sys.executable, "-m", "mpiddp", *arguments]
    done = subprocess.run(
        command, env=clean_env(), cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 2
    sentence = error("folder has", "mpiddp: ", ": cd DIR")
    assert re.fullmatch(f"{sentence}\n", done.stderr), done.stderr


def test_no_home_folder_for_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPIDDP_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    leave_home(monkeypatch)
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
