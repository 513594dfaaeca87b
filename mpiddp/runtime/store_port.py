"""The port that rank 0's agent has announced for torch's store, and the process that serves the store."""

from __future__ import annotations

import socket
from contextlib import suppress


class StorePort:
    """The socket of torch's store, and a lifeline: when it is closed, the process that serves the store ends.

    The agent keeps the port, so no other program can take it, and listens no more. Rank 0's script makes the
    process once it has imported torch, see `StoreOfJob`.
    """

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._lifeline, self._far_end = socket.socketpair()
        self.pid = 0  # of the process; 0 before there is one

    @property
    def files(self) -> list[int]:
        """What the script gets: the listener, and the far end of the lifeline."""
        files = [self._listener, self._far_end] if self._listener else []
        return [file.fileno() for file in files]

    def take(self, listener: socket.socket | None) -> None:
        """Keep the port of this socket. All its copies listen no more, until `listen` is called on one."""
        self._listener = listener
        if listener is not None:
            address = listener.getsockname()
            listener.shutdown(socket.SHUT_RD)
            with suppress(OSError):  # it is bound, unless the kernel has chosen the port
                listener.bind(address)

    def close(self) -> None:
        """End the process that serves the store, and give up the port."""
        for file in (self._listener, self._lifeline, self._far_end):
            if file is not None:
                file.close()
