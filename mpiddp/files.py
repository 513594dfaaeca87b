"""Files that are read and replaced as a whole, flushed to the disk; and folders with a lock."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct
from pathlib import Path

# The kernel's struct flock, of a whole file: type, whence, start, length, pid.
WRITE_LOCK = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


def read_limited(path: Path, limit: int, *, is_ours: bool = False) -> bytes:
    """The contents of a regular file of at most `limit` bytes; `is_ours`: of this user or root. Raises OSError."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):  # a pipe or a device may never end
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if is_ours and status.st_uid not in (0, os.geteuid()):
            raise PermissionError(errno.EPERM, "another user's file", str(path))
        content = file.read(min(status.st_size, limit) + 1)  # read allocates as much as it is told
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit} bytes", str(path))
    return content


def flush(path: Path) -> None:
    """fsync a file, or a folder's list of names, which some file systems (SMB, some of FUSE) refuse."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        cannot = (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EBADF)
        if error.errno not in cannot or not path.is_dir():
            raise


def part_of(path: Path) -> Path:
    """The path of a new file, which is renamed to this path, or to the target of this link, once it is whole.

    Raises OSError if the path is no regular file (as root, a rename would replace /dev/null), or the file to
    which this process prints, as /dev/stdout may be: all its later output would be lost.
    """
    printed = (path.samefile(stream) for stream in Path("/proc/self/fd").glob("[12]"))
    if path.exists() and (not path.is_file() or any(printed)):
        number = errno.EISDIR if path.is_dir() else errno.EINVAL
        raise OSError(number, os.strerror(number), str(path))
    whole = Path(os.path.realpath(path))
    return whole.with_name(f".{whole.name}.part")


def replace_file(path: Path, content: bytes) -> None:
    """Write a file in the place of `path`. On an error, the old file stays. Raises OSError."""
    part = part_of(path)
    try:
        part.write_bytes(content)
        flush(part)
        part.replace(os.path.realpath(path))
    except BaseException as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        if isinstance(error, OSError):  # the error of a full disk names no file
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def locked_folder(folder: Path, lock: str) -> int:
    """Make a folder for this user alone, with a file `lock` that is locked as long as the descriptor is open.

    No process sees the file without its lock. Raises OSError.
    """
    folder.mkdir(mode=0o700)
    unnamed = folder / "unnamed"
    owner = os.open(unnamed, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(owner, fcntl.LOCK_EX)
    unnamed.rename(folder / lock)
    return owner
