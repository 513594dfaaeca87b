"""Where `mpiddp ps`, `top`, `stacks` and `stop` find the launchers of this user.

A launcher has two Unix sockets in a folder that only its user may enter, with these suffixes. A viewer
connects, says nothing, and gets the descriptor of a file in memory, which holds a JSON object.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from pathlib import Path

JOB, STACKS = ".job", ".stacks"
_UCRED = struct.Struct("3i")  # pid, uid, gid; linux/socket.h


def folders() -> list[Path]:
    """The folders in which a launcher of this user may listen, the preferred one first."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    session = [Path(runtime, "mpiddp")] if runtime.startswith("/") else []
    usual = _usual()
    return [*session, usual, *sorted(usual.parent.glob(f"{usual.name}-*"))]


def _usual() -> Path:
    return Path(f"/tmp/mpiddp-{os.getuid()}")


def taken() -> str:
    """A sentence about the usual folder if another user has taken its name; "" if nobody has."""
    usual = _usual()
    if not os.path.lexists(usual) or is_private(usual):
        return ""
    return f"{usual} is not a folder of yours alone, so jobs listen in {usual}-… instead."


def new_folder() -> Path:
    """A folder whose name nobody can have taken, for a launcher that cannot use the usual one."""
    folder = Path(f"{_usual()}-{os.urandom(4).hex()}")
    folder.mkdir(mode=0o700)
    return folder


def is_private(folder: Path) -> bool:
    """Whether it is a folder of this user that nobody else may enter."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    is_own = found.st_uid == os.getuid() and not found.st_mode & 0o077
    return is_own and stat.S_ISDIR(found.st_mode)


def peer(connection: socket.socket) -> tuple[int, int]:
    """The pid and the uid of the process at the other end of a Unix socket: it connected, or it listens."""
    option = (socket.SOL_SOCKET, socket.SO_PEERCRED)
    pid, uid, _ = _UCRED.unpack(connection.getsockopt(*option, _UCRED.size))
    return pid, uid
