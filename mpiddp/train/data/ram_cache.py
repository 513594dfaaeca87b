"""Files of a data set kept in a host's memory: read from the disk once, by whichever rank comes first.

A folder in /dev/shm, shared by the ranks of one job on a host and by their workers. Its last user
removes it; what a killed job has left is removed by the next one. The kernel knows who uses it: all
hold a lock on it, which ends with them.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import shutil
import stat
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from mpiddp.errors import UserError

SHARED_MEMORY = Path("/dev/shm")
_LEFT_FREE = 0.1  # of the file system: whatever else lives in the memory must have room


class RamCache:
    """The cache of the job `name`, which its ranks on this host open each for itself."""

    def __init__(self, name: str, *, root: Path = SHARED_MEMORY) -> None:
        prefix = f"mpiddp-cache-{os.geteuid()}-"
        for folder in root.glob(f"{prefix}*"):
            _remove_unless_used(folder)
        self._folder = root / f"{prefix}{name}"
        self._lock = -1
        # A rank that looks for leftovers may come between the folder's making and its locking.
        while self._lock < 0 or not _is_there(self._folder, self._lock):
            self.close()
            with contextlib.suppress(FileNotFoundError):
                self._lock = _join(self._folder)

    def open(self, path: Path) -> BinaryIO:
        """The file for reading, from memory if it was read before.

        Raises:
            OSError: it cannot be read.
        """
        copy = self._folder / blake2b(os.fsencode(path.absolute()), digest_size=16).hexdigest()
        with contextlib.suppress(FileNotFoundError):
            return copy.open("rb")
        content = path.read_bytes()
        with contextlib.suppress(OSError):  # then the next reader comes here as well
            usage = shutil.disk_usage(self._folder)
            if usage.free - len(content) > _LEFT_FREE * usage.total:
                part = copy.with_suffix(f".{os.getpid()}")
                part.write_bytes(content)
                part.rename(copy)
        return io.BytesIO(content)

    def close(self) -> None:
        """Leave the cache; the last one to do so removes it."""
        if self._lock >= 0:
            _remove_if_last(self._folder, self._lock)
            self._lock = -1


def _join(folder: Path) -> int:
    """The folder, made if need be, with this process among those that use it.

    Raises:
        FileNotFoundError: somebody removed it meanwhile.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
        raise UserError(f"{folder} belongs to somebody else. Leave --cache ram out.")
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


def _is_there(folder: Path, lock: int) -> bool:
    """Whether the lock is on the folder of that name, not on one that was removed meanwhile."""
    try:
        return os.path.samestat(os.fstat(lock), folder.stat())
    except FileNotFoundError:
        return False


def _remove_unless_used(folder: Path) -> None:
    with contextlib.suppress(OSError):  # another rank may be at it, too
        _remove_if_last(folder, os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW))


def _remove_if_last(folder: Path, lock: int) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_there(folder, lock):
            shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(lock)
