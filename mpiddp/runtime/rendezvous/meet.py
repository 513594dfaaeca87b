"""The ranks meet: over MPI, or at an address that they know.

Both ways end with a coordinator, which speaks for all ranks, and with what the ranks know of each other. A
rank's agent comes here, and by hand the rank itself.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable

from mpiddp.errors import JobFailed, UserError
from mpiddp.hosts.sockets import bind
from mpiddp.protocol.channel import RANK, public_key
from mpiddp.protocol.variables import AGENT_STORE, JOIN_TIMEOUT_S, MAX_TIMEOUT_S, TIMEOUT
from mpiddp.runtime.job.channel import JobChannel
from mpiddp.runtime.job.connect import Server, connect_to_rank_0
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.rendezvous.address import find_by_address, rendezvous_over_channel
from mpiddp.runtime.rendezvous.channel_process import ChannelProcess
from mpiddp.runtime.rendezvous.mpi import Meeting, rendezvous_over_mpi
from mpiddp.runtime.rendezvous.result import RendezvousResult
from mpiddp.text import shown
from mpiddp.world import World

_LAUNCHER_HEAD_START_S = 15.0  # the launcher reports missing ranks first: it knows more of them

Met = Callable[[Coordinator, RendezvousResult], None]


def meet(world: World, meeting: Meeting, channel: JobChannel | None, met: Met) -> None:
    """Meet the other ranks. All ranks must call this.

    Args:
        channel: that of the launcher, None if there is none.
        met: called at the end. MPI is finalized after that.
    """
    has_launcher = channel is not None
    timeout_s = joining_timeout_s() + (_LAUNCHER_HEAD_START_S if has_launcher else 0.0)
    meeting = meeting._replace(timeout_s=timeout_s, has_channel=has_launcher)
    process = None
    if world.rank == 0 and world.world_size > 1 and not has_launcher:
        process = _start(world)
    # The ranks of a resource manager, which starts any program, may know rank 0's address already.
    is_named = bool(os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT"))
    has_address = is_named and world.launcher.starts_any_program
    if not world.launcher.speaks_mpi or world.world_size == 1 or has_address:
        _by_address(world, meeting, channel, process, met)
        return

    def go(result: RendezvousResult) -> None:
        found = channel
        if result.server is not None:
            if process is not None and result.channel_listener is not None:
                process.serve(result.channel_listener, result.server.key, world.world_size)
            found = _connect(result.server, world, timeout_s)
        names = result.hostnames
        met(Coordinator(result.world, found, hostnames=names, has_launcher=has_launcher), result)

    rendezvous_over_mpi(world, meeting, go)


def _start(world: World) -> ChannelProcess:
    """Rank 0's, where no launcher serves the channel. It starts while this process loads torch and MPI."""
    try:
        return ChannelProcess()
    except OSError as error:
        raise JobFailed(
            f"rank 0 on {world.hostname} cannot start the process that serves its job: "
            f"{error.strerror}."
        ) from None


def _by_address(
    world: World,
    meeting: Meeting,
    channel: JobChannel | None,
    process: ChannelProcess | None,
    met: Met,
) -> None:
    has_launcher, timeout_s = channel is not None, meeting.timeout_s
    world, listener = find_by_address(world, timeout_s)
    if channel is None and world.world_size > 1:
        if os.environ.get(AGENT_STORE) == "True":
            server = _serve_beside_agent(world, process, timeout_s)
        else:
            # The channel is where the ranks expect rank 0. They share no secret, so the key is public.
            names = ("SLURM_JOB_ID", "SLURM_STEP_ID")
            job = [*(os.environ.get(name, "") for name in names), str(world.master_port)]
            server = Server(f"{world.master_addr}:{world.master_port}", public_key(" ".join(job)))
            if process is not None and listener is not None:
                process.serve(listener, server.key, world.world_size)
                listener = _free_port(world)
        channel = _connect(server, world, timeout_s)
    meeting.ready()
    coordinator = Coordinator(world, channel)
    result = rendezvous_over_channel(coordinator, listener, timeout_s, meeting.own)
    coordinator.world, coordinator.hostnames = result.world, result.hostnames
    coordinator.has_launcher = has_launcher
    met(coordinator, result)


def _serve_beside_agent(world: World, process: ChannelProcess | None, timeout_s: float) -> Server:
    """Rank 0 writes into the store of torchrun's agent where it serves the channel."""
    from mpiddp.runtime.rendezvous.store import connect_to_store, no_dns, prefix_of_attempt

    with no_dns():
        store = connect_to_store(world, timeout_s)
        name = f"{prefix_of_attempt()}/channel"
        if process is not None:
            listener, key = _free_port(world), secrets.token_hex(16)
            store.set(name, f"{world.master_addr}:{listener.getsockname()[1]} {key}")
            process.serve(listener, key, world.world_size)
        try:
            return Server(*store.get(name).decode().split())
        except (RuntimeError, TypeError, ValueError):
            raise JobFailed(
                f"rank {world.rank} on {world.hostname}: no answer from rank 0 in {timeout_s:g} s."
            ) from None


def _connect(server: Server, world: World, timeout_s: float) -> JobChannel:
    return JobChannel(server, connect_to_rank_0(server, world, RANK, timeout_s), world)


def _free_port(world: World) -> socket.socket:
    return bind(str(world.master_addr), 0, world.hostname)


def joining_timeout_s() -> float:
    """The seconds in which all ranks must join. Raises UserError if the user's value is not a number."""
    text = os.environ.get(TIMEOUT, "")
    try:
        value = float(text) if text else JOIN_TIMEOUT_S
    except ValueError:
        value = 0.0
    if not 0 < value < MAX_TIMEOUT_S:
        raise UserError(
            f'{TIMEOUT}="{shown(text)}" is not a number of seconds greater than 0 '
            f"and less than {MAX_TIMEOUT_S}."
        )
    return value
