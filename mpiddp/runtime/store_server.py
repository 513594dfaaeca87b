"""Rank 0's agent owns torch's store: it keeps the ports, and starts the process that serves the stores of all attempts."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from mpiddp.runtime.helpers import Helpers

if TYPE_CHECKING:  # the agent loads it while the script's Python starts
    from mpiddp.runtime.rendezvous.sockets import Sockets

_PACKAGE = str(Path(__file__).parents[2])
# The folders come last, so that none of a user's modules takes the place of one of Python's.
CODE = (
    "import sys; sys.path[:] = [*sys.path[sys.path[0] == '':], *sys.argv[1:]]; "
    "from mpiddp.runtime.rendezvous.store_process import main; main()"
)


class StoreServer:
    """The sockets of an attempt, that of torch's store and that of MASTER_PORT, and the process of the store.

    The store listens from the start, so a client that comes before the process waits in the kernel. MASTER_PORT is
    only bound: no other program takes it, and whatever the script starts there can listen.
    """

    def __init__(self, helpers: Helpers) -> None:
        self._helpers, self._order = helpers, b""
        self._serves = self._is_known = False  # whether a script needs it, and has found its torch
        self._sockets: Sockets | None = None
        self._orders: socket.socket | None = None  # what the process reads
        self._pid = 0

    @property
    def runs(self) -> bool:
        return self._pid in self._helpers.pids  # the kernel may have killed it

    def take(self, sockets: Sockets, world_size: int, *, is_needed: bool) -> None:
        """Keep the sockets of an attempt. They are empty on all ranks but 0, and where torchrun serves the store."""
        self._sockets = sockets
        if sockets.store is None:
            return
        if not is_needed:  # the script in a command serves a store itself
            sockets.store.close()
        else:
            address, port, *_ = sockets.store.getsockname()
            place = {"host_name": address, "port": port, "world_size": world_size}
            self._order = json.dumps(place).encode()

    def serve(self, python: str, folders: Sequence[str], *, is_known: bool) -> None:
        """Serve the store of this attempt from now on. The folders lead to the torch of the script.

        The script asks for it before and after its import of torch, and then knows torch's own folder. If a process
        has not found torch before, another one starts.
        """
        listener = self._sockets and self._sockets.store
        self._is_known |= is_known
        if listener is None or not self._order or (self._serves and self.runs):
            return
        if not self.runs:
            self._orders, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
            # A stranger's PYTHONPATH would come before the folders of Python's own modules.
            env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSTARTUP")}
            command = [python, "-S", "-s", "-c", CODE, _PACKAGE, *folders]
            nothing = subprocess.DEVNULL
            with theirs:
                self._pid = self._helpers.start(
                    command, env=env, stdin=theirs, stdout=nothing, stderr=nothing
                )
        if self._orders is not None:
            with suppress(OSError):  # it has ended
                socket.send_fds(self._orders, [self._order], [listener.fileno()])
        self._serves, self._is_known = True, is_known

    @property
    def has_failed(self) -> bool:
        """Whether the process has ended while a script needs it. Then its clients no longer wait for it."""
        failed = self._serves and self._is_known and not self.runs
        if failed and self._sockets is not None and self._sockets.store is not None:
            self._sockets.store.close()
            self._serves, self._order = False, b""
        return failed

    def release(self) -> None:
        """End the store, and give up the ports."""
        self._serves, self._is_known, self._order = False, False, b""
        if self._sockets is not None:
            self._sockets.close()
        if self._orders is not None:
            with suppress(OSError):  # the process has ended
                self._orders.send(b"{}")
