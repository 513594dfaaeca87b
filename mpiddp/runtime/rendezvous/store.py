"""torch's store: rank 0 serves it on a socket that is already bound, and process groups connect to it."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpiddp.errors import JobFailed
from mpiddp.hosts.processes import name_process
from mpiddp.protocol.channel import STOP_SIGNALS, STORE_NAME, encode
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.world import World

if TYPE_CHECKING:  # a script that imports torch is served before its next line
    from torch.distributed import Store

_BACKLOG = 2048
_SHORTEST_S, _LONGEST_S = 0.001, 0.5  # between two looks whether the store is served


class StoreOfJob:
    """torch's store of this job, in the process of a script that has imported torch.

    Its place is what the launcher has chosen, whatever the script writes into MASTER_ADDR later. Rank 0 has
    `files`: the socket bound there, and, if no process serves stores yet, the one that brings its orders. Nobody
    listens there before the script itself asks for the store. So a program that the script starts, or
    becomes by exec, can do so as well.
    """

    def __init__(
        self, variables: Mapping[str, str], control: socket.socket, files: Sequence[socket.socket]
    ) -> None:
        self._control, self._files = control, files
        self.place = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
        self.world_size = int(variables["WORLD_SIZE"])

    def prepare(self) -> None:
        """On rank 0, make the process that serves the stores of all attempts, and tell its pid to the agent.

        It is a fork of a script that has just imported torch, so it costs no import. It outlives the script,
        because other ranks, and the next attempt, need a store. It is a child of the agent, which adopts
        orphans: a script that waits for all its children, or kills them, does not meet it.
        """
        for orders in self._files[1:]:
            with warnings.catch_warnings(), orders:
                warnings.simplefilter(
                    "ignore"
                )  # Python 3.12 warns of the threads of numpy's library
                child = os.fork()
                if child == 0:
                    try:
                        pid = os.fork()
                        if pid == 0:
                            _serve_attempts(orders)
                        else:
                            self._control.sendall(encode("store", pid=pid))
                    finally:
                        os._exit(0)
            with suppress(ChildProcessError):  # the script ignores SIGCHLD
                os.waitpid(child, 0)

    def serve(self) -> bool:
        """Let the process serve the store from now on. Returns False if this rank has no such process."""
        if not self._files:
            return False
        try:
            self._files[0].listen(_BACKLOG)
            self._control.sendall(b"\n" + encode("serve"))
        except OSError as error:  # another process serves it, or the script has closed all files
            return error.errno == errno.EADDRINUSE
        return True

    def wait(self, timeout: timedelta) -> None:
        """Wait until somebody serves the store. torch would wait for up to a minute between two looks."""
        from torch.distributed import DistNetworkError

        deadline, pause_s = time.monotonic() + timeout.total_seconds(), _SHORTEST_S
        while True:
            with suppress(OSError):
                socket.create_connection(self.place, timeout=_LONGEST_S).close()
                return
            if time.monotonic() > deadline:
                waited = f"timed out after {timeout.total_seconds():g} s"
                raise DistNetworkError(
                    f"The client socket has {waited}: nobody serves {self.place}."
                )
            time.sleep(pause_s)
            pause_s = min(1.2 * pause_s, _LONGEST_S)


def _serve_attempts(orders: socket.socket) -> None:
    """Serve the store of each attempt, as the agent orders, and end with the agent."""
    os.setsid()  # a signal to the script's process group is not for this process
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    name_process(STORE_NAME)
    for stream in range(3):  # a warning of torch must not get into a connection
        os.dup2(os.open(os.devnull, os.O_RDWR), stream)
    for file in {int(path.name) for path in Path("/proc/self/fd").iterdir()} - {
        *range(3),
        orders.fileno(),
    }:
        with suppress(OSError):
            os.close(file)
    stores = list[object]()
    # One order has the variables of an attempt, and its listener. The next one has neither, and ends its store.
    while (order := socket.recv_fds(orders, 1 << 16, 1))[0]:
        stores[:] = [serve_store(json.loads(order[0]), listener) for listener in order[1]]


def serve_store(env: Mapping[str, str], listener: int) -> Store:
    """Serve the store at MASTER_ADDR, where the file `listener` listens, as long as the result lives.

    `multi_tenant` lets an env:// or tcp:// init in rank 0's process use this server too.
    """
    address, port, world_size = (env[name] for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"))
    return _open(address, int(port), int(world_size), is_master=True, master_listen_fd=listener)


def _open(address: str, port: int, world_size: int, **options: Any) -> Store:
    from torch.distributed import TCPStore

    return TCPStore(address, port, world_size, wait_for_workers=False, multi_tenant=True, **options)


def store_of_group(coordinator: Coordinator, timeout_s: float) -> Store:
    """The store of a new process group of all ranks. All ranks must call this."""
    from torch.distributed import HashStore, PrefixStore

    world = coordinator.world
    name = coordinator.unique_prefix("group")
    if world.world_size == 1:
        return HashStore()
    store = connect_to_store(world, timeout_s)
    return PrefixStore(f"{prefix_of_attempt()}/{coordinator.group}/{name}", store)


def connect_to_store(world: World, timeout_s: float) -> Store:
    """The store that rank 0, or torchrun's agent, serves."""
    address, port = str(world.master_addr), world.master_port or 0
    try:
        return _open(address, port, world.world_size, timeout=timedelta(seconds=timeout_s))
    except RuntimeError:
        raise JobFailed(
            f"rank {world.rank} on {world.hostname} cannot reach torch's store of rank 0 at "
            f"{address} port {port} in {timeout_s:g} s.",
            fix="check that rank 0 is running, that no firewall blocks the port, and that no other program has it",
        ) from None


def prefix_of_attempt() -> str:
    """Of the keys of this attempt.

    torchrun's store outlives the workers. Restarted workers must not read the keys of the earlier ones.
    """
    return f"mpiddp/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
