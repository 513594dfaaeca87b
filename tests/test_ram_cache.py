"""A data set's files in a host's memory: each is read once from disk, and the last user removes them.

Tests mpiddp/train/data/ram_cache.py.
python -m pytest tests/test_ram_cache.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mpiddp.errors import UserError
from mpiddp.train.data import ram_cache
from mpiddp.train.data.ram_cache import RamCache
from tests.ranks import clean_env


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "image"
    path.write_bytes(b"pixels")
    return path


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    (tmp_path / "memory").mkdir()
    return tmp_path / "memory"


def test_a_file_is_read_from_the_disk_once(file: Path, memory: Path) -> None:
    one, other = RamCache("job", root=memory), RamCache("job", root=memory)
    assert one.open(file).read() == b"pixels"
    file.unlink()
    assert [cache.open(file).read() for cache in (one, other)] == [b"pixels"] * 2
    with pytest.raises(FileNotFoundError):
        one.open(file.with_name("another"))


def test_the_last_user_removes_the_cache(file: Path, memory: Path) -> None:
    one, other = RamCache("job", root=memory), RamCache("job", root=memory)
    one.open(file)
    one.close()
    (folder,) = memory.iterdir()
    assert [folder.stat().st_mode & 0o777, len(list(folder.iterdir()))] == [0o700, 1]
    other.close()
    assert list(memory.iterdir()) == []
    assert other.open(file).read() == b"pixels"  # read from disk


def test_the_cache_of_a_killed_job_is_removed_by_the_next_job(file: Path, memory: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path\n"
        "from mpiddp.train.data.ram_cache import RamCache\n"
        "RamCache('killed', root=Path(sys.argv[1])).open(Path(sys.argv[2]))\n"
        f"os.kill(os.getpid(), {int(signal.SIGKILL)})\n"
    )
    command = [sys.executable, "-c", program, str(memory), str(file)]
    assert subprocess.run(command, env=clean_env()).returncode == -signal.SIGKILL
    (left,) = memory.iterdir()
    assert left.name == f"mpiddp-cache-{os.geteuid()}-killed"
    running = RamCache("running", root=memory)
    RamCache("next", root=memory)
    assert not left.exists()
    assert running.open(file).read() == b"pixels"
    assert (memory / f"mpiddp-cache-{os.geteuid()}-running").exists()


def test_a_recreated_folder_is_not_removed_by_an_earlier_user(file: Path, memory: Path) -> None:
    one = RamCache("job", root=memory)
    (folder,) = memory.iterdir()
    folder.rmdir()
    other = RamCache("job", root=memory)
    other.open(file)
    one.close()
    assert len(list(folder.iterdir())) == 1
    other.close()
    assert list(memory.iterdir()) == []


def test_nothing_is_cached_if_memory_is_full(
    file: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = RamCache("job", root=memory)
    monkeypatch.setattr(ram_cache, "_LEFT_FREE", 1.0)
    assert cache.open(file).read() == b"pixels"
    (folder,) = memory.iterdir()
    assert list(folder.iterdir()) == []


def test_a_folder_of_another_user_is_refused(memory: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (memory / f"mpiddp-cache-{os.geteuid()}-job").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"-job belongs to another user\. Omit --cache ram\."):
        RamCache("job", root=memory)
