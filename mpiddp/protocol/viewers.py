"""Where `mpiddp ps`, `top`, `stacks` and `stop` find the launchers of this user.

A launcher has a Unix socket in a new folder of its own, which only its user may enter. It speaks the job
channel there, see `mpiddp.protocol.channel`: a viewer asks for one of VIEWS, and gets one line.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import struct
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from mpiddp.protocol.channel import Peer, encode
from mpiddp.text import escaped

_SOCKET = "job"
_UCRED = struct.Struct("3i")  # pid, uid, gid; linux/socket.h


class Console:
    """The socket of a job, over all its attempts. Without a name or a folder for it, the job runs unseen."""

    def __init__(self, name: str = "") -> None:
        self._name = escaped(name)
        self._began_at = time.time()
        self.attempts = 0  # that have begun. The server of each answers
        self.listener: socket.socket | None = None
        self._opened = ExitStack()
        for parent in _parents() if name else ():
            folder = parent / f"{_prefix()}{os.urandom(8).hex()}"
            with ExitStack() as stack, suppress(OSError):
                folder.mkdir(mode=0o700)
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
                listener = stack.enter_context(socket.socket(socket.AF_UNIX))
                listener.bind(str(folder / "new"))
                listener.listen()
                listener.setblocking(False)
                (folder / "new").rename(folder / _SOCKET)  # last: viewers remove a dead socket
                self.listener, self._opened = listener, stack.pop_all()
                break
        self.close = self._opened.close

    def answer(self, viewer: Peer, **facts: object) -> None:
        """Send a viewer these facts, and those of the job itself."""
        age_s = time.time() - self._began_at
        own = {"pid": os.getpid(), "name": self._name, "age_s": age_s, "attempt": self.attempts}
        viewer.send(encode("answer", b"", **own, **facts))


def sockets() -> list[Path]:
    """The sockets of all launchers of this user, and those that dead ones have left."""
    found = []
    for folder in (each for parent in _parents() for each in parent.glob(f"{_prefix()}*")):
        with suppress(OSError):
            status = folder.lstat()
            # Another user may make a folder of any name in /tmp.
            is_private = status.st_uid == os.getuid() and not status.st_mode & 0o077
            if is_private and stat.S_ISDIR(status.st_mode):
                found.append(folder / _SOCKET)
    return found


def _parents() -> list[Path]:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return [*([Path(runtime)] if runtime.startswith("/") else []), Path("/tmp")]


def _prefix() -> str:
    return f"mpiddp-job-{os.getuid()}-"


def peer(connection: socket.socket) -> tuple[int, int]:
    """The pid and the uid of the process at the other end of a Unix socket: it connected, or it listens."""
    option = (socket.SOL_SOCKET, socket.SO_PEERCRED)
    pid, uid, _ = _UCRED.unpack(connection.getsockopt(*option, _UCRED.size))
    return pid, uid
