"""The port of torch's store, from the time at which rank 0's agent has announced it."""

from __future__ import annotations

import socket

from mpiddp.hosts.sockets import reserve


class StorePort:
    """Its socket: rank 0's script listens there once it has imported torch.

    A process that the script starts before may be the one that forms the group, so it must be able to listen
    there. No other program can take the port.
    """

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self.listens = False  # and the script has not imported torch

    def take(self, listener: socket.socket | None) -> None:
        self._socket, self.listens = listener, listener is not None

    def leave(self) -> None:
        """A process of the program may listen in its place."""
        if self._socket is not None and self.listens:
            reserve(self._socket)
            self.listens = False

    def close(self) -> None:
        """Leave it to the script, or to nobody."""
        if self._socket is not None:
            self._socket.close()
        self._socket, self.listens = None, False
