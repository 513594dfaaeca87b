"""A folder of this process alone, for its sockets and for mpirun's files."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from mpiddp.errors import cause_of
from mpiddp.files import locked_folder
from mpiddp.hosts.private import is_private

_LOCK = "owner.lock"
_LONGEST_PARENT = 60  # characters: a Unix socket's path has at most 107


@contextmanager
def private_folder(env: Mapping[str, str]) -> Iterator[Path]:
    """A folder in TMPDIR or /tmp, as long as the body lasts.

    Folders without a lock are removed first, because their owners were killed. Only those of this machine
    are, because locks of other machines may not be seen here (NFS with nolock, Lustre with localflock).
    """
    parent = env.get("TMPDIR", "")
    # An mpirun splits the arguments for ssh at blanks and colons. (Importing tempfile would take 10 ms.)
    is_fit = re.fullmatch(f"/[^ :]{{,{_LONGEST_PARENT}}}", parent)
    if not is_fit or not os.access(parent, os.W_OK | os.X_OK):
        parent = "/tmp"
    beginning = f"mpiddp-{zlib.crc32(socket.gethostname().encode()):08x}"
    for lock in Path(parent).glob(f"{beginning}-*/{_LOCK}"):
        # If the owner is alive, it holds the lock. A file that another user may write is not opened.
        with suppress(OSError):
            if is_private(lock.parent):
                with lock.open("rb+") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(lock.parent, ignore_errors=True)
    folder = Path(parent, f"{beginning}-{os.urandom(8).hex()}")
    try:
        owner = locked_folder(folder, _LOCK)
    except OSError as error:
        raise cause_of(error)(f"cannot create a folder in {parent} ({error.strerror}).") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(owner)
