"""Whether anything has happened in the job: one rank of each host asks the store for all of them.

Every other rank holds a connection to the asking rank. As long as it is open, nothing has happened. When the
asking rank learns of anything, or ends, the connection closes, and the ranks ask the store by themselves.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct

from mpiddp.runtime.job.signed_store import NEWS, SignedStore
from mpiddp.world import World

_KEY = "asks for host"  # in the store; its value is the name of an abstract Unix socket
_ATTEMPTS = 20  # checks in which a rank looks for the one that asks; it may start later


class HostNews:
    """The view of one rank. Only the thread that checks may use it."""

    def __init__(self, values: SignedStore, world: World) -> None:
        self._values = values
        self._key = f"{_KEY}/{world.node_rank}"
        self._listener: socket.socket | None = None
        self._others: list[socket.socket] = []
        self._connection: socket.socket | None = None  # to the rank that asks for this one
        ranks = world.local_world_size or 1
        asks = ranks == 1 or world.local_rank == 0
        self._attempts = 0 if asks else _ATTEMPTS
        if ranks > 1 and asks:
            self._listen(ranks)

    @property
    def asks(self) -> bool:
        """Whether this rank asks the store itself."""
        return self._connection is None

    def may_be_there(self) -> bool:
        """Whether anything may have happened. Does not wait.

        Raises:
            RuntimeError: the store has ended.
        """
        if self._connection is None and self._attempts:
            self._connect()
        if self._connection is not None:
            if _is_open(self._connection):
                return False
            self.close()
        self._accept()
        return self._values.get(NEWS) is not None

    def close(self) -> None:
        """Ask by itself from now on, and let the other ranks of the host do so."""
        self._attempts = 0
        for other in self._others:
            with contextlib.suppress(OSError):
                other.shutdown(socket.SHUT_RDWR)  # a forked worker of a DataLoader has a copy
        for each in (self._listener, self._connection, *self._others):
            if each is not None:
                each.close()
        self._listener = self._connection = None
        self._others.clear()

    def _listen(self, ranks: int) -> None:
        listener = socket.socket(socket.AF_UNIX)
        listener.setblocking(False)
        try:
            listener.bind("")  # the kernel chooses an abstract name: no file remains
            listener.listen(ranks)
        except OSError:  # a sandbox without such sockets: every rank asks
            listener.close()
            return
        self._listener = listener
        self._values.set(self._key, listener.getsockname()[1:].decode())

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # until nobody waits
            while self._listener is not None:
                other, _ = self._listener.accept()
                if _is_of_this_user(other):
                    self._others.append(other)
                else:
                    other.close()

    def _connect(self) -> None:
        self._attempts -= 1
        name = self._values.get(self._key)
        if name is None:
            return
        connection = socket.socket(socket.AF_UNIX)
        connection.setblocking(False)
        try:
            connection.connect(f"\0{name}")
            is_trusted = _is_of_this_user(connection)
        except OSError:  # it has ended, or is in another network namespace of this host
            is_trusted = False
        if is_trusted:
            self._connection = connection
        else:
            connection.close()


def _is_open(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def _is_of_this_user(connection: socket.socket) -> bool:
    """An abstract socket has no permissions, so that any user could connect, or take a free name."""
    layout = struct.Struct("3i")
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size)
    _, user, _ = layout.unpack(peer)
    return bool(user == os.getuid())
