"""Where `mpiddp ps`, `top`, `stacks` and `stop` find the launchers of this user.

A launcher has a Unix socket in a folder that only its user may enter. It speaks the job channel there, see
`mpiddp.protocol.messages`: a viewer asks for one of VIEWS, and gets one line.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import time
from pathlib import Path
from typing import Any

from mpiddp.text import escaped

JOB = ".job"  # the suffix of the socket
_TRIES = 3  # another launcher may remove the empty folder
_UCRED = struct.Struct("3i")  # pid, uid, gid; linux/socket.h


class Console:
    """The socket of a job, over all of its attempts. Without a folder to listen in, it runs unseen.

    Attributes:
        attempts: that have begun. The server of each answers.
    """

    def __init__(self, name: str = "") -> None:
        self._name = escaped(name)
        self._began_at = time.time()
        self.attempts = 0
        self.listener: socket.socket | None = None
        self._path = Path()

    def listen(self, folder: Path) -> bool:
        """Listen in this folder. The socket gets its name last: a viewer removes one that does not listen."""
        unnamed = folder / os.urandom(4).hex()
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            if not is_private(folder):
                return False
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(unnamed))
            stack.callback(unnamed.unlink, missing_ok=True)
            listener.listen()
            listener.setblocking(False)
            self._path = unnamed.rename(unnamed.with_suffix(JOB))
            self.listener = listener
            stack.pop_all()
        return self.listener is not None

    def close(self) -> None:
        if self.listener is not None:
            self.listener.close()
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
                self._path.parent.rmdir()  # the last launcher removes it

    @property
    def facts(self) -> dict[str, Any]:
        """What a viewer is told of the job itself."""
        return {
            "pid": os.getpid(),
            "name": self._name,
            "age_s": time.time() - self._began_at,
            "attempt": self.attempts,
        }


def open_console(name: str) -> Console:
    """The console of the job with this name, which viewers find in a folder of this user."""
    console = Console(name)
    if not any(console.listen(folder) for folder in folders() * _TRIES) and taken():
        console.listen(Path(f"{_usual()[-1]}-{os.urandom(4).hex()}"))  # a name that nobody can have
    return console


def folders() -> list[Path]:
    """The folders in which a launcher of this user may listen, the preferred one first."""
    *session, usual = _usual()
    return [*session, usual, *sorted(usual.parent.glob(f"{usual.name}-*"))]


def _usual() -> list[Path]:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    session = [Path(runtime, "mpiddp")] if runtime.startswith("/") else []
    return [*session, Path(f"/tmp/mpiddp-{os.getuid()}")]


def taken() -> str:
    """A sentence about the folder in /tmp if another user has taken its name, and no other is usual."""
    *_, folder = _usual()
    if any(map(is_private, _usual())) or not os.path.lexists(folder):
        return ""
    return f"{folder} is not a folder of yours alone, so jobs listen in {folder}-… instead."


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
