"""The ranks meet: over MPI, or at an address that they know.

    with meet(world, lambda: RankInfo.of_this_process(world)) as (coordinator, result): ...

A rank's agent comes here, and by hand the rank itself. Both ways have one course: every rank tells the others
who it is, rank 0 compares them and offers the addresses on which it listens, and all take the same one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from mpiddp.errors import JobFailed, UserError
from mpiddp.hosts.sockets import bind, port_in, reachable
from mpiddp.protocol.channel import RANK, public_key
from mpiddp.protocol.variables import AGENT_STORE, JOIN_TIMEOUT_S, RUN_ID, TIMEOUT
from mpiddp.runtime.job.channel import JobChannel
from mpiddp.runtime.job.connect import Server, connect_to_server
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.rendezvous.address import (
    check_interface,
    choose,
    find_by_address,
    requested_interface,
    unreachable,
)
from mpiddp.runtime.rendezvous.channel_process import serve_beside
from mpiddp.runtime.rendezvous.mpi import over_mpi
from mpiddp.runtime.rendezvous.placement import check_alike
from mpiddp.runtime.rendezvous.result import (
    RankInfo,
    RendezvousResult,
    gathered,
    ranks_by_host,
    world_with,
)
from mpiddp.text import parse_duration
from mpiddp.world import World

_LAUNCHER_HEAD_START_S = 15.0  # the launcher reports missing ranks first: it knows more of them

Met = tuple[Coordinator, RendezvousResult]
Gather = Callable[[Any], list[Any]]  # every rank's value, by rank
# Where rank 0 listens for the clients of torch's store: the address, why this one, and the port.
Place = tuple[str, str, int]
Listeners = dict[Place, socket.socket | None]  # None if another process listens there


@contextlib.contextmanager
def meet(
    world: World,
    own: Callable[[], RankInfo],
    channel: JobChannel | None = None,
    *,
    keep_mpi: bool = False,
) -> Iterator[Met]:
    """Meet the other ranks. All ranks must call this. MPI is finalized after the body, which takes a while.

    Args:
        own: what the others learn of this rank. It is called once MPI has begun, and may wait.
        channel: that of the launcher. Without one, rank 0 serves a channel.
    """
    has_launcher = channel is not None
    timeout_s = joining_timeout_s() + (_LAUNCHER_HEAD_START_S if has_launcher else 0.0)
    is_alone = world.world_size == 1
    # The ranks of a resource manager, which starts any program, may know rank 0's address already.
    is_named = bool(os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT"))
    has_address = is_named and world.launcher.starts_any_program
    if not world.launcher.speaks_mpi or is_alone or has_address:
        yield _by_address(world, own, channel, timeout_s)
        return
    with over_mpi(world, own, timeout_s, channel, keep_mpi=keep_mpi) as (info, gather):
        result = _agree(world, info, gather, partial(_listen_for_all, world), is_reached=False)
        if result.listener is not None:
            _drain(result.listener)
        if channel is None:
            server = _from_rank_0(world, gather, partial(_serve, result.world))
            channel = _connect(Server(*server), world, timeout_s)
        else:
            gather(None)  # a script that connects to torch's store before would be drained too
        names = result.hostnames
        yield Coordinator(result.world, channel, hostnames=names, has_launcher=has_launcher), result


def _by_address(
    world: World,
    own: Callable[[], RankInfo],
    channel: JobChannel | None,
    timeout_s: float,
) -> Met:
    has_launcher = channel is not None
    world, listener = find_by_address(world, timeout_s)
    address, port = str(world.master_addr), world.master_port or 0
    if channel is None and world.world_size > 1:
        if os.environ.get(AGENT_STORE) == "True":
            server = _serve_beside_agent(world, timeout_s)
        else:
            # The channel is where the ranks expect rank 0. They share no secret, so the key is public.
            ids = [os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
            key = public_key(" ".join([*ids, str(port)]))
            server = Server(f"{address}:{port}", key)
            if listener is not None:
                serve_beside(listener, key, world.world_size)
                listener = bind(address, 0, world.hostname)
        channel = _connect(server, world, timeout_s)
    info = own()
    coordinator = Coordinator(world, channel, has_launcher=has_launcher)

    def offer(infos: Sequence[RankInfo]) -> Listeners:
        if (requested := requested_interface(os.environ)) and len(ranks_by_host(infos)) > 1:
            check_interface(infos, requested)
        own_port = listener.getsockname()[1] if listener is not None else port
        return {(address, f"{world.launcher.name} names it", own_port): listener}

    gather = partial(coordinator.all_gather_json, timeout_s=timeout_s)
    with coordinator.all_or_none():
        result = _agree(world, info, gather, offer, is_reached=True)
    coordinator.world, coordinator.hostnames = result.world, result.hostnames
    return coordinator, result


def _agree(
    world: World,
    own: RankInfo,
    gather: Gather,
    offer: Callable[[Sequence[RankInfo]], Listeners],
    *,
    is_reached: bool,
) -> RendezvousResult:
    """What the ranks know of each other, and where rank 0 is. All ranks return, or raise, the same.

    Every rank reaches every collective, also after an error. Only rank 0 calls `offer`. With `is_reached`,
    the ranks have connected to the only place that it offers.
    """
    infos = gathered(gather(own.as_json()))
    listeners: Listeners = {}

    def of_rank_0() -> list[Any]:
        check_alike(infos, os.environ)
        listeners.update(offer(infos))
        return [list(listeners), os.environ.get(RUN_ID) or secrets.token_hex(8)]

    found, run_id = _from_rank_0(world, gather, of_rank_0)
    places = [(address, reason, port) for address, reason, port in found]
    place = places[0] if is_reached else _reached_by_all(world, infos, gather, places)
    listener = listeners.pop(place, None)
    for other in filter(None, listeners.values()):
        other.close()
    address, reason, port = place
    interface = infos[world.rank].interface_for(address, requested_interface(os.environ))
    joined = world_with(world, infos, address, port)
    return RendezvousResult(joined, infos, interface, reason, listener, run_id)


def _from_rank_0(world: World, gather: Gather, make: Callable[[], Any]) -> Any:
    """What `make` returns on rank 0, on every rank. Its UserError or JobFailed is raised there as well."""
    said: dict[str, Any] = {}
    if world.rank == 0:
        try:
            said = {"value": make()}
        except (UserError, JobFailed) as error:
            said = {"problem": str(error), "is_failure": isinstance(error, JobFailed)}
    said = gather(said)[0]
    if "problem" in said:
        raise (JobFailed if said["is_failure"] else UserError)(said["problem"])
    return said["value"]


def _listen_for_all(world: World, infos: Sequence[RankInfo]) -> Listeners:
    """Listen on every candidate before the ranks hear of it, so that no other program takes its port."""
    found: Listeners = {}
    for address, reason in choose(infos, os.environ):
        listener = bind(address, port_in(os.environ), world.hostname)
        found[address, reason, listener.getsockname()[1]] = listener
    return found


def _reached_by_all(
    world: World, infos: Sequence[RankInfo], gather: Gather, places: Sequence[Place]
) -> Place:
    """The first place that every other host reaches, of which one rank tries them all."""
    addresses, _, ports = zip(*places, strict=True)
    firsts = [ranks[0] for ranks in ranks_by_host(infos).values()]
    tries = world.rank in firsts[1:]
    reached = gather(reachable(addresses, ports) if tries else addresses)
    for place in places:
        if all(place[0] in each for each in reached):
            return place
    raise JobFailed(unreachable(infos, addresses, reached))


def _drain(listener: socket.socket) -> None:
    """Accept and close the attempts in the backlog, so that the store sees only its clients."""
    listener.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            listener.accept()[0].close()
    listener.setblocking(True)


def _serve(world: World) -> Server:
    """Serve the channel beside rank 0, at any port of its address."""
    address, key = str(world.master_addr), secrets.token_hex(16)
    listener = bind(address, 0, world.hostname)
    server = Server(f"{address}:{listener.getsockname()[1]}", key)
    serve_beside(listener, key, world.world_size)
    return server


def _serve_beside_agent(world: World, timeout_s: float) -> Server:
    """Rank 0 writes into the store of torchrun's agent where it serves the channel."""
    from mpiddp.runtime.rendezvous.store import connect_to_store, no_dns, prefix_of_attempt

    with no_dns():
        store = connect_to_store(world, timeout_s)
        name = f"{prefix_of_attempt()}/channel"
        if world.rank == 0:
            store.set(name, " ".join(_serve(world)))
        try:
            return Server(*store.get(name).decode().split())
        except (RuntimeError, TypeError, ValueError):
            raise JobFailed(
                f"rank {world.rank} on {world.hostname}: no answer from rank 0 in {timeout_s:g} s."
            ) from None


def _connect(server: Server, world: World, timeout_s: float) -> JobChannel:
    connection = connect_to_server(
        server, world, "hello", role=RANK, name="rank 0's channel", answer_in_s=timeout_s
    )
    return JobChannel(server, connection, world)


def joining_timeout_s() -> float:
    """The seconds in which all ranks must join. Raises UserError if the user's value is no duration."""
    try:
        return parse_duration(os.environ.get(TIMEOUT) or f"{JOIN_TIMEOUT_S}")
    except ValueError as error:
        raise UserError(f"{TIMEOUT}: {error}.") from None
