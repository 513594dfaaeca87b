"""Where rank 0's agent has announced torch's store: its port, and how long it is served there."""

from __future__ import annotations

import socket

from mpiddp.hosts.sockets import reserve
from mpiddp.runtime.child import Child


class StorePort:
    """The socket of torch's store, and one whose end ends the process that serves the store.

    Rank 0's script makes that process once it has imported torch. A process that the script starts before may
    be the one that forms the group, so it must be able to listen there. No other program can take the port.
    """

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self.listens = False  # and the script has not imported torch
        self.is_served = False  # by a process that outlives the script
        self._lifeline, self._its_lifeline = socket.socketpair()

    @property
    def files(self) -> list[int]:
        """What the script gets: where the store is to listen, and the lifeline of its process."""
        if self._socket is None:
            return []
        return [self._socket.fileno(), self._its_lifeline.fileno()]

    def take(self, listener: socket.socket | None) -> None:
        self._socket, self.listens = listener, listener is not None

    def see(self, child: Child) -> None:
        """Act on what the script says of the store, or on a process of its own that may form the group."""
        if "store" in child.said:
            self.is_served = True
            child.others.add(child.said.pop("store")["pid"])
        if self.listens and child.has_children:
            child.hear()  # that process may be the one that serves the store
        if "torch" in child.said:
            self.hand_over()
        elif self.listens and child.has_children:
            self.leave()

    def leave(self) -> None:
        """A process of the program may listen in its place."""
        if self._socket is not None and self.listens:
            reserve(self._socket)
            self.listens = False

    def hand_over(self) -> None:
        """Leave the port to whoever serves the store, or to nobody."""
        if self._socket is not None:
            self._socket.close()
        self._its_lifeline.close()
        self._socket, self.listens = None, False

    def close(self) -> None:
        """End the process that serves the store."""
        self.hand_over()
        self._lifeline.close()
