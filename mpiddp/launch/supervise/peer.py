"""A connection to the control channel, and what the kernel knows of its other end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
from dataclasses import dataclass

from mpiddp.protocol.messages import URGENT

_UCRED = struct.Struct("3i")  # pid, uid, gid; linux/socket.h
_SIOCOUTQ = 0x5411  # bytes that the peer has not acknowledged yet


@dataclass(eq=False)
class Peer:
    """A process that has connected. `rank` is None until it has proved that it belongs to the job."""

    connection: socket.socket
    challenge: str
    since: float
    rank: int | None = None
    is_script: bool = False
    buffer: bytes = b""
    unsent: bytes = b""
    was_interrupted: bool = False

    def interrupt(self) -> None:
        """Make the process write its stacks: an urgent byte makes its kernel signal it."""
        self.was_interrupted = True
        with contextlib.suppress(OSError):  # the next read fails too
            if self.connection.family == socket.AF_UNIX:
                option = (socket.SOL_SOCKET, socket.SO_PEERCRED)
                pid, _, _ = _UCRED.unpack(self.connection.getsockopt(*option, _UCRED.size))
                os.kill(pid, signal.SIGURG)
            else:
                self.connection.send(URGENT, socket.MSG_OOB)

    @property
    def is_silent(self) -> bool:
        """Whether its host has not acknowledged what was sent to it over TCP."""
        import fcntl

        return any(fcntl.ioctl(self.connection, _SIOCOUTQ, bytes(4)))
