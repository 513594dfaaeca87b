"""Paths that a user names: their errors in one sentence, and reads that end.

A path may be too long, in a folder that must not be searched, a pipe, or a link to /dev/zero.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from mpiddp.errors import JobFailed, UserError
from mpiddp.text import escaped

# The errors of a path or a command that is wrong. Any other's cause is a machine: a disk, a file server.
_WRONG = {
    *(errno.E2BIG, errno.EACCES, errno.EEXIST, errno.EFBIG, errno.EINVAL, errno.EISDIR),
    *(errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOEXEC, errno.ENOTDIR, errno.EPERM),
}


def cause_of(error: OSError) -> type[UserError] | type[JobFailed]:
    """UserError if the path or the command is wrong, JobFailed if a machine failed."""
    return UserError if error.errno in _WRONG else JobFailed


@contextlib.contextmanager
def named_by(option: str) -> Iterator[None]:
    """Raise an error of a file in the body as one sentence that begins with `option`, "" for none.

    UserError and JobFailed are raised as by `cause_of`.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None or error.strerror is None:  # not an error of a file
            raise
        sentence = f"{option} {os.fsdecode(error.filename)}: {error.strerror}."
        raise cause_of(error)(sentence.lstrip()) from None


def read_limited(path: Path, limit: int) -> bytes:
    """The contents of a regular file of at most `limit` bytes.

    Raises:
        OSError: it cannot be read, or is larger, or is a pipe or a device, which may never end.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit} bytes", str(path))
    return content


def check_program(name: str, path: str | None) -> None:
    """Raise UserError if `name` is no program: by its path, or on the search path `path`."""
    if shutil.which(name, path=path) is not None:
        return
    if os.sep not in name:
        raise UserError(f'"{escaped(name)}" is not a program on PATH.')
    with named_by(""):
        is_file = stat.S_ISREG(Path(name).stat().st_mode)
    hint = " It may not be executed: chmod +x would allow it." if is_file else ""
    raise UserError(f"{escaped(name)} is not a program.{hint}")
