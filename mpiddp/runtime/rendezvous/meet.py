"""The ranks meet: over MPI, at an address that they know, or, as children of ranks, over the job's channel.

All ways end with a coordinator, which speaks for all ranks, and with what the ranks know of each other. Each
way imports only what it needs.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from mpiddp.errors import JobFailed, UserError
from mpiddp.hosts.sockets import bind
from mpiddp.protocol.channel import CHILD, RANK, public_key
from mpiddp.protocol.variables import (
    AGENT_STORE,
    CHANNEL,
    CHANNEL_SECRET,
    MAX_TIMEOUT_S,
    RUN_ID,
    TIMEOUT,
)
from mpiddp.runtime.job.channel import JobChannel
from mpiddp.runtime.job.connect import AnotherProgram, Server, introduce
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.job.session import Session
from mpiddp.runtime.rendezvous.result import RendezvousResult
from mpiddp.text import parse_whole, shown
from mpiddp.world import World

if TYPE_CHECKING:
    from mpiddp.runtime.rendezvous.channel_process import ChannelProcess
    from mpiddp.runtime.rendezvous.mpi import MpiWatchdog

_JOIN_TIMEOUT_S = 60.0
_LAUNCHER_HEAD_START_S = 15.0  # the launcher reports missing ranks first: it knows more of them


def meet(
    world: World, session: Session, *, keep_mpi: bool, uses_torch: bool
) -> tuple[Coordinator, RendezvousResult]:
    """Meet the other ranks. All ranks must call this. For the arguments see `mpiddp.runtime.start.join.join`.

    Raises:
        UserError: inconsistent variables of launchers, a foreign MPI.
        JobFailed: ranks that do not join.
        SystemExit: code 2, on every rank, after rank 0 has printed the reason.
    """
    timeout_s = limit_s = joining_timeout_s()
    if session.launcher is not None:
        limit_s += _LAUNCHER_HEAD_START_S
    process, watchdog = _channel_process(world, session), _mpi_watchdog(world, limit_s)
    if uses_torch:
        try:
            _import_torch()
        except BaseException:  # a script may catch it, and go on
            if watchdog is not None:
                watchdog.close()
            raise
    session.send("joining", timeout_s=timeout_s)
    if watchdog is None:
        coordinator, result = _by_address(world, session, process, limit_s)
    else:
        coordinator, result = _over_mpi(
            world, session, process, watchdog, limit_s, keep_mpi=keep_mpi
        )
    has_launcher = session.launcher is not None
    coordinator = coordinator.met(result.world, result.hostnames, has_launcher=has_launcher)
    session.channel = coordinator.channel
    _serve_store(coordinator, result.listener, session, uses_torch=uses_torch)
    return coordinator, result


def _import_torch() -> None:
    """Import torch, unless it is imported, and tell the garbage collector that its modules are no garbage.

    They live as long as the process. Otherwise the collector visits their 250,000 objects while they are
    made, in each full collection of the training, and several times when the process ends: a third of the
    processor time of a short rank.
    """
    if "torch" in sys.modules:
        return
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        import torch  # noqa: F401 - a rank that hangs here has not joined, and the launcher names the line

        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


def _channel_process(world: World, session: Session) -> ChannelProcess | None:
    """Rank 0's, where no launcher serves the channel. It starts while this process loads torch and MPI."""
    if session.launcher is not None or world.rank > 0 or world.world_size == 1:
        return None
    from mpiddp.runtime.rendezvous.channel_process import ChannelProcess

    try:
        return ChannelProcess()
    except OSError as error:
        raise JobFailed(
            f"rank 0 on {world.hostname} cannot start the process that serves its job: "
            f"{error.strerror}."
        ) from None


def _mpi_watchdog(world: World, timeout_s: float) -> MpiWatchdog | None:
    """None where the ranks do not meet over MPI."""
    if not world.launcher.speaks_mpi or world.world_size == 1 or _has_address(world):
        return None
    from mpiddp.runtime.rendezvous.mpi import MpiWatchdog

    return MpiWatchdog(world, timeout_s)


def _over_mpi(
    world: World,
    session: Session,
    process: ChannelProcess | None,
    watchdog: MpiWatchdog,
    timeout_s: float,
    *,
    keep_mpi: bool,
) -> tuple[Coordinator, RendezvousResult]:
    from mpiddp.runtime.rendezvous.mpi import rendezvous_over_mpi

    has_channel = session.channel is not None
    result = rendezvous_over_mpi(world, watchdog, keep_mpi=keep_mpi, has_channel=has_channel)
    channel = session.channel
    if result.server is not None:
        if process is not None and result.channel_listener is not None:
            process.serve(result.channel_listener, result.server.key, world.world_size)
        channel = _connect(result.server, world, session, timeout_s)
    return Coordinator(result.world, channel), result


def _by_address(
    world: World, session: Session, process: ChannelProcess | None, timeout_s: float
) -> tuple[Coordinator, RendezvousResult]:
    from mpiddp.runtime.rendezvous.address import find_by_address, rendezvous_over_channel

    world, listener = find_by_address(world, timeout_s)
    channel = session.channel
    if channel is None and world.world_size > 1:
        if os.environ.get(AGENT_STORE) == "True":
            server = _serve_beside_agent(world, process, timeout_s)
        else:
            server = _serve_at_address(world, listener, process)
        if listener is not None:  # the channel has it
            listener = _free_port(world)
        channel = _connect(server, world, session, timeout_s)
    coordinator = Coordinator(world, channel)
    return coordinator, rendezvous_over_channel(coordinator, listener, timeout_s)


def _serve_at_address(
    world: World, listener: socket.socket | None, process: ChannelProcess | None
) -> Server:
    """Rank 0 serves the channel where the ranks expect it. They share no secret, so the key is public."""
    job = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_STEP_ID", "")
    key = public_key(" ".join((*job, str(world.master_port))))
    if listener is not None and process is not None:
        process.serve(listener, key, world.world_size)
    return Server(f"{world.master_addr}:{world.master_port}", key)


def _serve_beside_agent(world: World, process: ChannelProcess | None, timeout_s: float) -> Server:
    """Rank 0 writes into the store of torchrun's agent where it serves the channel."""
    import secrets

    from mpiddp.runtime.rendezvous.store import connect_to_store, no_dns, prefix_of_attempt

    with no_dns():
        store = connect_to_store(world, timeout_s)
        name = f"{prefix_of_attempt()}/channel"
        if process is not None:
            listener = _free_port(world)
            address = f"{world.master_addr}:{listener.getsockname()[1]}"
            key = secrets.token_hex(16)
            process.serve(listener, key, world.world_size)
            store.set(name, f"{address} {key}")
        try:
            address, key = store.get(name).decode().split()
        except (RuntimeError, ValueError):
            raise JobFailed(
                f"rank {world.rank} on {world.hostname}: no answer from rank 0 in {timeout_s:g} s."
            ) from None
    return Server(address, key)


def _free_port(world: World) -> socket.socket:
    return bind(str(world.master_addr), 0, world.hostname)


def _has_address(world: World) -> bool:
    """Whether the ranks of a resource manager, which starts any program, know rank 0's address already."""
    is_named = bool(os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT"))
    return is_named and world.launcher.starts_any_program


def _connect(
    server: Server, world: World, session: Session, timeout_s: float, role: str = RANK
) -> JobChannel:
    """Connect to the process beside rank 0, or, as a child of a rank, to whichever server its job has.

    Raises:
        JobFailed: it cannot be reached.
    """
    host, _, port = server.address.rpartition(":")
    try:
        introduced = introduce(server, world, "hello", {"role": role}, answer_in_s=timeout_s)
    except AnotherProgram:
        raise JobFailed(
            f"rank {world.rank} on {world.hostname}: another program listens on {host} port {port}, not rank "
            "0 of this job. Set MASTER_PORT to a free port."
        ) from None
    except (OSError, OverflowError) as error:
        raise JobFailed(
            f"rank {world.rank} on {world.hostname} cannot reach the other ranks at {host} port {port} "
            f"({error}). Check that rank 0 is running and that no firewall blocks the port."
        ) from None
    channel = JobChannel(server, introduced, world, session.stop.wakes, role)
    threading.Thread(target=channel.listen, daemon=True).start()
    return channel


def _serve_store(
    coordinator: Coordinator,
    listener: socket.socket | None,
    session: Session,
    *,
    uses_torch: bool,
) -> None:
    """Serve torch's store on rank 0's listener, for process groups and for commands."""
    if not uses_torch:
        from mpiddp.runtime.rendezvous.store_process import serve_commands

        with coordinator.all_or_none():
            if listener is not None:
                serve_commands(coordinator.world, listener, session)
    elif listener is not None:
        from mpiddp.runtime.rendezvous.store import no_dns, serve_store

        with no_dns():
            session.torch_store = serve_store(coordinator.world, listener)


def meet_as_child(world: World, session: Session, *, waits: bool = True) -> Coordinator:
    """Meet the child processes of the other ranks, over the channel of the job.

    The n-th child of a rank meets the n-th children of the others.

    Args:
        waits: for these children. Otherwise their hosts stay unknown.

    Raises:
        UserError: variables that are not those of a rank.
        JobFailed: ranks that have ended, children that do not join.
    """
    env, timeout_s = os.environ, joining_timeout_s()
    try:
        world = replace(
            world,
            master_addr=env["MASTER_ADDR"],
            master_port=parse_whole(env["MASTER_PORT"], 1, 1 << 16),
            node_rank=parse_whole(env["GROUP_RANK"]),
            num_nodes=parse_whole(env["GROUP_WORLD_SIZE"], 1),
        )
        if session.channel is None and world.world_size > 1:
            server = Server(env[CHANNEL], env[CHANNEL_SECRET])
            session.channel = _connect(server, world, session, timeout_s, CHILD)
    except (KeyError, ValueError):
        raise UserError(
            f"MASTER_ADDR, MASTER_PORT, GROUP_RANK, GROUP_WORLD_SIZE, {CHANNEL} and {CHANNEL_SECRET} are "
            "not those of the rank that started this process. Leave them as they are, or unset "
            f"{RUN_ID} to start a job of its own."
        ) from None
    if session.channel is not None:
        session.channel.enter()
    coordinator = Coordinator(world, session.channel)
    if not waits:
        return coordinator
    hostnames = coordinator.all_gather_json(world.hostname, timeout_s=timeout_s)
    return coordinator.met(world, tuple(hostnames))


def joining_timeout_s() -> float:
    """The seconds in which all ranks must join. Raises UserError if the user's value is not a number."""
    text = os.environ.get(TIMEOUT, "")
    try:
        value = float(text) if text else _JOIN_TIMEOUT_S
    except ValueError:
        value = 0.0
    if not 0 < value < MAX_TIMEOUT_S:
        raise UserError(
            f'{TIMEOUT}="{shown(text)}" is not a number of seconds greater than 0 '
            f"and less than {MAX_TIMEOUT_S}."
        )
    return value
