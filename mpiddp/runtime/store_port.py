"""Where rank 0's agent has announced torch's store: its port, and how long it is served there."""

from __future__ import annotations

import socket

from mpiddp.hosts.sockets import reserve
from mpiddp.runtime.child import Child


class StorePort:
    """The socket of torch's store, and a lifeline: when it is closed, the process that serves the store ends.

    Rank 0's script makes that process once it has imported torch. A process that the script starts before may
    be the one that forms the group, so it must be able to listen there. No other program can take the port.
    """

    def __init__(self) -> None:
        # What the script gets: the listener, and the far end of the lifeline.
        self._files: list[socket.socket] = []
        self.listens = False  # until the script has imported torch
        self.is_served = False  # a process serves the store, and outlives the script
        self._lifeline, self._far_end = socket.socketpair()

    @property
    def files(self) -> list[int]:
        return [file.fileno() for file in self._files]

    def take(self, listener: socket.socket | None) -> None:
        if listener is not None:
            self._files, self.listens = [listener, self._far_end], True

    def see(self, child: Child) -> None:
        """Act on what the script says of the store, or on a process of its own that may form the group."""
        starts_others = self.listens and child.has_children
        if starts_others:
            child.hear()  # that process may be the one that serves the store
        if "store" in child.messages:
            self.is_served = True
            child.others.add(child.messages.pop("store")["pid"])
        if "torch" in child.messages:
            self.hand_over()
        elif starts_others:
            self.leave()

    def leave(self) -> None:
        """Let a process of the program listen in the place of this one."""
        if self.listens:
            reserve(self._files[0])
            self.listens = False

    def hand_over(self) -> None:
        """Leave the port to whoever serves the store, or to nobody."""
        for file in (*self._files, self._far_end):
            file.close()
        self._files, self.listens = [], False

    def close(self) -> None:
        """End the process that serves the store."""
        self.hand_over()
        self._lifeline.close()
