"""torch's store: rank 0 serves it on a socket that is already bound, and process groups connect to it."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from mpiddp.errors import JobFailed
from mpiddp.hosts.processes import name_process
from mpiddp.protocol.channel import STOP_SIGNALS, STORE_NAME
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.patches import no_dns
from mpiddp.world import World

if TYPE_CHECKING:  # a script that imports torch is served before its next line
    from torch.distributed import Store


def serve_store(env: Mapping[str, str], listener: int) -> Store:
    """Serve the store at MASTER_ADDR, where the file `listener` listens, as long as the result lives.

    `multi_tenant` lets an env:// or tcp:// init in rank 0's process use this server too.
    """
    with no_dns():
        return _serve(env, listener)


def _serve(env: Mapping[str, str], listener: int) -> Store:
    address, port, world_size = (env[name] for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"))
    return _open(address, int(port), int(world_size), is_master=True, master_listen_fd=listener)


def serve_beside(env: Mapping[str, str], listener: socket.socket, lifeline: socket.socket) -> int:
    """Serve the store in a process of its own, until the other end of `lifeline` is closed. Returns its pid.

    It is a fork of a script that has just imported torch, so it costs no import. It outlives the script:
    other ranks may need the store when rank 0 has ended.
    """
    pid = os.fork()
    if pid == 0:
        try:
            _serve_until_closed(env, listener.detach(), lifeline.detach())
        finally:
            os._exit(0)
    listener.close()
    lifeline.close()
    return pid


def _serve_until_closed(env: Mapping[str, str], listener: int, lifeline: int) -> None:
    os.setsid()  # a signal to the script's process group is not for this process
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    name_process(STORE_NAME)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # a warning of torch must not get into a connection
        os.dup2(nothing, stream)
    low, high = sorted((listener, lifeline))
    for first, end in (3, low), (low + 1, high), (high + 1, os.sysconf("SC_OPEN_MAX")):
        os.closerange(first, end)
    with no_dns():  # the store looks up each connection that it accepts
        store = _serve(env, listener)
        os.read(lifeline, 1)
        del store


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
    with no_dns():
        store = connect_to_store(world, timeout_s)
        # Inside the body, because rank 0 looks up the name of every connection that it accepts.
        coordinator.all_gather_json(None, timeout_s=timeout_s)
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
