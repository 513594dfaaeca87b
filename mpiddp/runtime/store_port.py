"""The port that rank 0's agent has announced for torch's store, and the process that serves the store."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path


class StorePort:
    """The socket of torch's store in an attempt, and a connection to the process that serves the stores of all.

    The agent keeps the port, so no other program can take it, and listens no more. The first script that has
    imported torch makes the process, see `StoreOfJob`. It ends with the agent.
    """

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._process, self._far_end = socket.socketpair(type=socket.SOCK_SEQPACKET)
        self.pid = 0  # of the process; 0 before there is one
        self._order = b""  # the variables of a store that nobody serves yet

    @property
    def files(self) -> list[int]:
        """What the script gets: the listener, and what the process reads if there is none yet."""
        is_served = self.pid and Path(f"/proc/{self.pid}").exists()  # the kernel may have killed it
        files = [self._listener, *([] if is_served else [self._far_end])] if self._listener else []
        return [file.fileno() for file in files]

    def take(self, listener: socket.socket | None, variables: Mapping[str, str]) -> None:
        """Keep the port of this socket. All its copies listen no more, until `listen` is called on one."""
        self._listener = listener
        if listener is not None:
            self._order = json.dumps(dict(variables)).encode()
            address = listener.getsockname()
            listener.shutdown(socket.SHUT_RD)
            with suppress(OSError):  # it is bound, unless the kernel has chosen the port
                listener.bind(address)

    def serve(self) -> None:
        """Let the process serve the store. The script asks for it with each of its groups."""
        if self._order and self._listener:
            socket.send_fds(self._process, [self._order], [self._listener.fileno()])
        self._order = b""

    def release(self) -> None:
        """End the store, and give up the port."""
        if self._listener is not None:
            self._listener.close()
        if self.pid:
            self._process.send(b"{}")
