"""The ranks meet: the host and the files of each come in, and the address of torch's store goes out.

    met = meet(Coordinator(world), apart=False)

A rank's agent comes here, and by hand the rank itself. They meet over the launcher's channel, or without a
launcher over MPI or at an address.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from mpiddp.errors import JobFailed, UserError
from mpiddp.protocol.variables import AGENT_STORE, JOIN_TIMEOUT_S, TIMEOUT
from mpiddp.runtime.job.connection import Server
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.rendezvous import result, sockets
from mpiddp.runtime.rendezvous.result import Gather, Infos, RankInfo
from mpiddp.runtime.rendezvous.sockets import Sockets
from mpiddp.text import parse_duration
from mpiddp.world import World

_LAUNCHER_HEAD_START_S = 15.0  # the launcher reports missing ranks first: it knows more of them


class Met(NamedTuple):
    """What a rank knows once it has met the others."""

    variables: dict[str, str]
    store_port: int  # of torch's store, at MASTER_ADDR
    sockets: Sockets


def meet(
    ranks: Coordinator,
    problem: str = "",
    files: Callable[[], result.Files] = tuple,
    program: str = "",
    *,
    apart: bool,
) -> Met:
    """Meet the other ranks, which learn this one's facts and its problem. All ranks must call this.

    All ranks compare `program`, the name of what they run, and the first rank of each host calls `files`, so that
    several hosts can compare its contents. `ranks` may be connected to the launcher; without one, rank 0 serves
    the job channel. `apart`: torch's store has a port of its own, and MASTER_PORT is left to the scripts.
    """
    env, world = os.environ, ranks.world
    timeout_s = joining_timeout_s() + _LAUNCHER_HEAD_START_S * ranks.has_launcher
    is_alone = world.world_size == 1 and env.get(AGENT_STORE) != "True"
    way: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if not (is_alone or ranks.has_launcher):
        from mpiddp.runtime.rendezvous.by_hand import way_to_meet  # takes 5 ms of each rank

        way = way_to_meet(ranks, timeout_s)
    with way, ranks.all_or_none():
        world, gather = ranks.world, partial(ranks.all_gather_json, timeout_s=timeout_s)
        infos = result.gathered(gather(RankInfo.of_this_process(world, problem, program)))
        ranks.hostnames = tuple(info.hostname for info in infos)
        ranks.ranks_here = result.ranks_by_host(infos)[infos[world.rank].host]
        if any(info.problem for info in infos):
            raise UserError(problem)  # "" on a rank that could begin
        # Long, and the same on most ranks: a gather sends what all have only once.
        is_first = ranks.ranks_here[0] == world.rank and len(ranks.ranks_here) < world.world_size
        programs = gather(files() if is_first else ())
        _from_rank_0(world, gather, partial(result.check_alike, infos, programs, env))
        address, ports, bound = _place(world, infos, gather, apart=apart)
        world = result.joined(world, infos, address, ports[0])
        if ranks.connection is None and world.world_size > 1:  # they have met over MPI alone
            from mpiddp.runtime.rendezvous.channel_process import serve_beside

            server = _from_rank_0(world, gather, partial(serve_beside, world))
            ranks.connect(world, Server(*server), answer_s=timeout_s)
        ranks.world = world
        info = infos[world.rank]
        interface = info.interface_for(address, result.requested_interface(env))
        variables = result.variables_of(world, info, interface, infos[0].run_id)
        if (
            ":" in address
        ):  # it is no part of a URL, but the host's name is, if all hosts find the address by it
            name, leads_there = infos[0].hostname, False
            with contextlib.suppress(UserError, JobFailed):
                leads_there = sockets.resolve(name) == address
            variables["MASTER_ADDR"] = name if all(gather(leads_there)) else address
        return Met(variables, ports[1], bound)


def _place(
    world: World, infos: Infos, gather: Gather, *, apart: bool
) -> tuple[str, tuple[int, int], Sockets]:
    """The first address of rank 0 that every other host reaches, MASTER_PORT and the store's port.

    One rank of each host tries them all. Rank 0 listens on every candidate before the ranks hear of it, so
    that no other program takes its port.
    """
    named = world.master_addr
    if named is not None and os.environ.get(AGENT_STORE) == "True":
        port = world.master_port or 0
        return named, (port, port), Sockets()
    candidates: dict[str, Sockets] = {}

    def listen() -> dict[str, tuple[int, int]]:
        for address in [named] if named else result.choose(infos, os.environ):
            port = 0 if named else sockets.port_in(os.environ)  # the channel has the known one
            master = sockets.bind(address, port, world.hostname)
            candidates[address] = Sockets(master)
            if apart:
                candidates[address] = Sockets(sockets.bind(address, 0, world.hostname), master)
        return {address: _ports(bound) for address, bound in candidates.items()}

    ports: dict[str, tuple[int, int]] = _from_rank_0(world, gather, listen)
    _, *others = [ranks[0] for ranks in result.ranks_by_host(infos).values()]
    tries = world.rank in others
    of_stores = [port for _, port in ports.values()]
    reached = gather(sockets.reachable([*ports], of_stores) if tries else [*ports])
    reachable = next((name for name in ports if all(name in names for names in reached)), None)
    if reachable is None:
        cut_off = [rank for rank in others if not reached[rank]] or others
        raise JobFailed(
            f"{', '.join(infos[rank].hostname for rank in cut_off)} cannot reach any address of "
            f"{infos[0].hostname} ({', '.join(ports)}) within {sockets.PROBE_TIMEOUT_S:g} s.",
            fix="open the firewall or connect the networks, or name a reachable address: --master-addr ADDR",
        )
    bound = candidates.pop(reachable, Sockets())
    for other in candidates.values():
        other.close()
    if bound.store is not None:
        # Accept and close the attempts in the backlog, so that the store sees only its clients. None connects
        # before all ranks have met.
        bound.store.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                bound.store.accept()[0].close()
        bound.store.setblocking(True)
    if bound.master is not None:
        sockets.stop_listening(bound.master)
    master_port, store_port = ports[reachable]
    return reachable, (master_port, store_port), bound


def _ports(bound: Sockets) -> tuple[int, int]:
    """MASTER_PORT, and the port of the store."""
    assert bound.store is not None
    return (bound.master or bound.store).getsockname()[1], bound.store.getsockname()[1]


def _from_rank_0(world: World, gather: Gather, make: Callable[[], Any]) -> Any:
    """What `make` returns on rank 0, on every rank. Its UserError or JobFailed is raised there as well."""
    made, problem, is_failure = None, "", False
    if world.rank == 0:
        try:
            made = make()
        except (UserError, JobFailed) as error:
            problem, is_failure = str(error), isinstance(error, JobFailed)
    made, problem, is_failure = gather((made, problem, is_failure))[0]
    if problem:
        raise (JobFailed if is_failure else UserError)(problem)
    return made


def joining_timeout_s() -> float:
    """The seconds in which all ranks must join. Raises UserError if the user's value is no duration."""
    try:
        return parse_duration(os.environ.get(TIMEOUT) or f"{JOIN_TIMEOUT_S}")
    except ValueError as error:
        raise UserError(f"{TIMEOUT}: {error}.") from None
