"""Keep the files of a data set in a host's memory. The first rank that needs a file reads it from disk.

The cache is a folder in /dev/shm, shared by the ranks of one job on a host and by their workers. Its last
user removes it, and the next job removes the folder of a killed job. Every user holds a lock on the
folder, which the kernel releases when the process ends.
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
_LEFT_FREE = 0.1  # fraction of the file system left to other users of the memory


class RamCache:
    """The cache of the job `name`. Each of the job's ranks on this host opens it."""

    def __init__(self, name: str, *, root: Path = SHARED_MEMORY) -> None:
        prefix = f"mpiddp-cache-{os.geteuid()}-"
        for folder in root.glob(f"{prefix}*"):
            _remove_unless_used(folder)
        self._folder = root / f"{prefix}{name}"
        self._lock = -1
        # A rank that removes leftovers may remove the folder after its creation and before its lock.
        while self._lock < 0 or not _is_there(self._folder, self._lock):
            self.close()
            with contextlib.suppress(FileNotFoundError):
                self._lock = _join(self._folder)

    def open(self, path: Path) -> BinaryIO:
        """Open the file for reading, from memory if it was read before.

        Raises:
            OSError: the file cannot be read.
        """
        copy = self._folder / blake2b(os.fsencode(path.absolute()), digest_size=16).hexdigest()
        with contextlib.suppress(FileNotFoundError):
            return copy.open("rb")
        content = path.read_bytes()
        with contextlib.suppress(OSError):  # without a copy, the next reader reads the disk again
            usage = shutil.disk_usage(self._folder)
            if usage.free - len(content) > _LEFT_FREE * usage.total:
                part = copy.with_suffix(f".{os.getpid()}")
                part.write_bytes(content)
                part.rename(copy)
        return io.BytesIO(content)

    def close(self) -> None:
        """Leave the cache. The last user removes it."""
        if self._lock >= 0:
            _remove_if_last(self._folder, self._lock)
            self._lock = -1


def _join(folder: Path) -> int:
    """Create the folder if it is missing, and lock it as one of its users.

    Raises:
        FileNotFoundError: another process has removed it meanwhile.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
        raise UserError(f"{folder} belongs to another user. Omit --cache ram.")
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


def _is_there(folder: Path, lock: int) -> bool:
    """Whether the lock is on the current folder of that name, not on a removed one."""
    try:
        return os.path.samestat(os.fstat(lock), folder.stat())
    except FileNotFoundError:
        return False


def _remove_unless_used(folder: Path) -> None:
    with contextlib.suppress(OSError):  # another rank may remove it at the same time
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
