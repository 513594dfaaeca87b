"""Folders of the user alone: for the environment variables of the ranks, and for the files of a process.

The variables, the job's key among them, are carried by no network in clear text. The launcher sends them to
each host over ssh, where this module keeps them. An agent takes them from there, and removes the folder as
soon as all ranks have met. This module travels as source.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import socket
import stat
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mpiddp.hosts.processes import kill_marked
from mpiddp.hosts.reachability import CONNECT_S, meet, reason
from mpiddp.protocol.channel import HOST, NO_MESSAGE, introduce, member_key

# /dev/shm would not do, because logind empties it at a user's last logout. Hosts may share this folder.
_PARENT, _BEGINNING = Path("/tmp"), "mpiddp-private-"
_LOCK = "owner.lock"
_LONGEST_PARENT = 60  # characters: a Unix socket's path has at most 107
_STALE_S = 86400.0  # an older folder is removed, because its launcher was killed


def new_name() -> str:
    return f"{_BEGINNING}{os.urandom(16).hex()}"


def packed(variables: Mapping[str, str]) -> bytes:
    """The variables as /proc/PID/environ has them: b"NAME=VALUE", each with a zero behind."""
    return b"".join(os.fsencode(f"{name}={value}\0") for name, value in variables.items())


def ready(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Reach the launcher and the other hosts, and keep the variables, before the ranks of this host start.

    Returns the error of the "launcher", and those of the other "hosts" as `meet` does.
    """
    launcher = reach_launcher(wanted["launcher"], wanted["key"])
    hosts = meet(*wanted["meet"]) if wanted["meet"] else {}
    keep(wanted["name"], wanted["variables"])
    _check_room(Path(os.environ.get("TMPDIR") or "/tmp"))
    return {"launcher": launcher, "hosts": hosts}


def reach_launcher(at: str, key: str) -> str:
    """The reason why this host cannot connect to the launcher, as its ranks will; "" if it can."""
    address, _, port = at.rpartition(":")
    try:
        with socket.create_connection((address, int(port)), CONNECT_S) as connection:
            introduce(connection, member_key(key, HOST, 0), "hello", 0, {"role": HOST})
        return ""
    except NO_MESSAGE:
        return "another program answers"
    except OSError as error:
        return reason(error)


def keep(name: str, variables: bytes) -> None:
    """Put packed variables where `take` finds them. Both raise OSError if others can enter the folder."""
    for folder, status in private_folders(_PARENT, _BEGINNING):
        if status.st_mtime < time.time() - _STALE_S:
            shutil.rmtree(folder, ignore_errors=True)
    folder = _folder(name)
    with suppress(FileExistsError):  # another host shares /tmp
        folder.mkdir(mode=0o700)
    _check(folder)
    part = folder / os.urandom(8).hex()
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(variables)
    part.rename(folder / "variables")


def _check_room(folder: Path) -> None:
    """Raise OSError if the folder is full or read-only: Open MPI's daemon would end without a reason."""
    from tempfile import TemporaryFile  # takes 10 ms

    try:
        with TemporaryFile(dir=folder) as file:
            file.write(b"\n")
    except FileNotFoundError:
        return  # the daemon uses /tmp instead
    except OSError as error:  # the error of a full disk names no file
        raise OSError(error.errno, error.strerror, str(folder)) from None


def take(name: str) -> dict[str, str]:
    """The variables that this host keeps under this name."""
    _check(folder := _folder(name))
    rows = (folder / "variables").read_bytes().split(b"\0")[:-1]
    return dict(os.fsdecode(row).split("=", 1) for row in rows)


def _folder(name: str) -> Path:
    if not re.fullmatch(f"{_BEGINNING}[0-9a-f]{{32}}", name):
        raise ValueError(name)  # an empty name would be the parent itself
    return _PARENT / f"{name}-{os.getuid()}"  # hosts with other users may share the parent


def _check(folder: Path) -> os.stat_result:
    """The status of a folder. Raises OSError unless it is a real one, which only this user can enter."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(errno.EPERM, "another user can enter it", str(folder))
    return status


def private_folders(parent: Path, beginning: str) -> Iterator[tuple[Path, os.stat_result]]:
    """The folders of this user alone whose names begin so. Others may make any name, and a pipe, in /tmp."""
    with suppress(OSError):  # as root on NFS, this user may not enter the parent
        for folder in parent.glob(f"{beginning}*"):
            with suppress(OSError):  # it is not, or is removed meanwhile
                yield folder, _check(folder)


def remove(name: str) -> None:
    """Remove the variables that this host keeps under this name, if it does."""
    shutil.rmtree(_folder(name), ignore_errors=True)


def sweep(mark: str, name: str, outputs: Sequence[str]) -> list[int]:
    """Remove the leftovers of an attempt: its variables, and its processes, whose pids it returns."""
    remove(name)
    return kill_marked(mark.encode(), outputs)


# --- a folder of this process ---


@contextmanager
def own_folder(env: Mapping[str, str]) -> Iterator[Path]:
    """A folder in TMPDIR or /tmp, as long as the body lasts.

    Folders without a lock are removed first, because their owners were killed. Only those of this machine
    are, because locks of other machines may not be seen here (NFS with nolock, Lustre with localflock).
    """
    from mpiddp.errors import cause_of  # which do not travel
    from mpiddp.files import locked_folder

    parent = env.get("TMPDIR", "")
    # An mpirun splits the arguments for ssh at blanks and colons. (Importing tempfile would take 10 ms.)
    is_fit = re.fullmatch(f"/[^ :]{{,{_LONGEST_PARENT}}}", parent)
    if not is_fit or not os.access(parent, os.W_OK | os.X_OK):
        parent = "/tmp"
    beginning = f"mpiddp-{zlib.crc32(socket.gethostname().encode()):08x}"
    for folder, _ in private_folders(Path(parent), f"{beginning}-"):
        # If the owner is alive, it holds the lock.
        with suppress(OSError), (folder / _LOCK).open("rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
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
