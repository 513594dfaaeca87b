"""torch's store: rank 0 serves it on a socket that is already bound, and process groups connect to it."""

from __future__ import annotations

import errno
import os
import select
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
_SHORTEST_S, _LONGEST_S = 0.01, 0.5  # between two looks whether the store is served


class StoreOfJob:
    """torch's store of this job, in the process of a script that has imported torch.

    Its place is what the launcher has chosen, whatever the script writes into MASTER_ADDR later. Rank 0 has
    `files`: the socket bound there, and the far end of a lifeline. Nobody listens there before the script
    itself asks for the store. So a program that the script starts, or becomes by exec, can do so as well.
    """

    def __init__(self, variables: Mapping[str, str], files: Sequence[socket.socket]) -> None:
        self._variables, self._files = variables, files
        self.place = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
        self.world_size = int(variables["WORLD_SIZE"])
        self._starts: socket.socket | None = None

    def prepare(self, control: socket.socket | None) -> None:
        """On rank 0, make the process that serves the store, and tell its pid to the agent.

        It is a fork of a script that has just imported torch, so it costs no import. It outlives the script,
        because other ranks may need the store when rank 0 has ended. It is a child of the agent, which adopts
        orphans: a script that waits for all its children, or kills them, does not meet it.
        """
        if not self._files:
            return
        self._starts, theirs = socket.socketpair()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 warns of the threads of numpy's library
            child = os.fork()
            if child == 0:
                try:
                    pid = os.fork()
                    if pid == 0:
                        self._serve_if_asked(theirs)
                    elif control is not None:
                        control.sendall(encode("store", pid=pid))
                finally:
                    os._exit(0)
        theirs.close()
        with suppress(ChildProcessError):  # the script ignores SIGCHLD
            os.waitpid(child, 0)

    def _serve_if_asked(self, asks: socket.socket) -> None:
        """Serve the store once the script asks for it, and until the other end of the lifeline is closed."""
        os.setsid()  # a signal to the script's process group is not for this process
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        name_process(STORE_NAME)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):  # a warning of torch must not get into a connection
            os.dup2(nothing, stream)
        listener, lifeline = self._files
        kept = {*range(3), listener.fileno(), lifeline.fileno(), asks.fileno()}
        for file in {int(path.name) for path in Path("/proc/self/fd").iterdir()} - kept:
            with suppress(OSError):
                os.close(file)
        poll = select.poll()  # select() refuses high numbers of files
        for end in (asks, lifeline):
            poll.register(end, select.POLLIN)
        poll.poll()
        if asks.recv(1, socket.MSG_DONTWAIT):
            store = serve_store(self._variables, listener.detach())
            lifeline.recv(1)
            del store

    def serve(self) -> bool:
        """Let the process serve the store from now on. Returns False if this rank has no such process."""
        if self._starts is None:
            return False
        try:
            self._files[0].listen(_BACKLOG)
            self._starts.send(b"!")
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
                raise DistNetworkError(f"The client socket has {waited}: nobody serves {self.place}.")
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_S)


def serve_store(env: Mapping[str, str], listener: int) -> Store:
    """Serve the store at MASTER_ADDR, where the file `listener` listens, as long as the result lives.

    `multi_tenant` lets an env:// or tcp:// init in rank 0's process use this server too.
    """
    address, port, world_size = (env[name] for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"))
    return _open(address, int(port), int(world_size), is_master=True, master_listen_fd=listener)


def _open(address: str, port: int, world_size: int, **options: Any) -> Store:
    from torch.distributed import TCPStore

    options |= {"wait_for_workers": False, "multi_tenant": True}
    return TCPStore(address, port, world_size, **options)


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
            f"{address} port {port} in {timeout_s:g} s. Check that rank 0 is "
            "running, that no firewall blocks the port, and that no other program listens on it."
        ) from None


def prefix_of_attempt() -> str:
    """Of the keys of this attempt.

    torchrun's store outlives the workers. Restarted workers must not read the keys of the earlier ones.
    """
    return f"mpiddp/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
