"""The ranks meet: over the launcher's channel, or without a launcher over MPI or at an address.

    ranks, variables, listener = meet(Coordinator(world, None), RankInfo.of_this_process(world))

A rank's agent comes here, and by hand the rank itself. Whatever they meet over gathers a value of every rank,
and there is one course: every rank tells the others who it is, rank 0 compares them and listens on its
addresses, and all take the first one that every other host reaches.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from zlib import crc32

from mpiddp.errors import JobFailed, UserError
from mpiddp.hosts import sockets
from mpiddp.protocol.variables import AGENT_STORE, JOIN_TIMEOUT_S, TIMEOUT, VERBOSE
from mpiddp.runtime.job.coordinator import Coordinator, Server
from mpiddp.runtime.rendezvous import result
from mpiddp.runtime.rendezvous.channel_process import serve_beside
from mpiddp.runtime.rendezvous.mpi import over_mpi
from mpiddp.runtime.rendezvous.result import Gather, Infos, RankInfo
from mpiddp.text import parse_duration, shown
from mpiddp.world import World

_LAUNCHER_HEAD_START_S = 15.0  # the launcher reports missing ranks first: it knows more of them


def meet(
    ranks: Coordinator, info: RankInfo
) -> tuple[Coordinator, dict[str, str], socket.socket | None]:
    """Meet the other ranks, which learn `info` of this one. All ranks must call this.

    `ranks` may be connected to the launcher; without one, rank 0 serves the job channel. Returns the ranks,
    the variables of each, and rank 0's socket for torch's store, which is bound before it is announced.
    """
    env, world = os.environ, ranks.world
    timeout_s = joining_timeout_s() + _LAUNCHER_HEAD_START_S * ranks.has_launcher
    is_alone = world.world_size == 1 and env.get(AGENT_STORE) != "True"
    # The ranks of a resource manager, which starts any program, may know rank 0's address already.
    is_named = bool(env.get("MASTER_ADDR") and env.get("MASTER_PORT"))
    meeting: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if (
        world.launcher.mpis
        and not ranks.has_launcher
        and not (is_alone or (is_named and world.launcher.starts_any_program))
    ):
        meeting = over_mpi(ranks, timeout_s)
    elif not (is_alone or ranks.has_launcher):
        ranks = _by_address(world, timeout_s)
    with meeting, ranks.all_or_none():
        world, gather = ranks.world, partial(ranks.all_gather_json, timeout_s=timeout_s)
        infos = result.gathered(gather(info._replace(program=())))
        ranks.hostnames = names = tuple(each.hostname for each in infos)
        if any(each.problem for each in infos):
            raise UserError(info.problem)  # "" on a rank that could begin
        # Long, and the same on most ranks: a gather sends what all have only once.
        programs = gather(info.program)
        infos = [each._replace(program=programs[each.rank]) for each in infos]
        _from_rank_0(world, gather, partial(result.check_alike, infos, env))
        address, port, listener = _place(world, infos, gather)
        world = result.joined(world, infos, address, port)
        if ranks.connection is None and world.world_size > 1:  # they have met over MPI alone
            server = _from_rank_0(world, gather, partial(serve_beside, world))
            ranks = Coordinator(world, Server(*server), answer_s=timeout_s)
        ranks.world, ranks.hostnames = world, names
        interface = infos[world.rank].interface_for(address, result.requested_interface(env))
        if env.get(VERBOSE):
            places = _places(world, infos) if world.rank == 0 else ""
            own = f"rank {world.rank} on {world.hostname} uses {interface}\n"
            print(f"{places}{own}", end="", flush=True)
        return ranks, result.variables_of(world, interface, infos[0].run_id), listener


def _by_address(world: World, timeout_s: float) -> Coordinator:
    """The channel of ranks that know the address of rank 0, which is set in their world."""
    address, port = address_of_rank_0(world, os.environ)
    world = replace(world, master_addr=address, master_port=port)
    if os.environ.get(AGENT_STORE) == "True":
        server = _serve_beside_agent(world, timeout_s)
    else:
        # The channel is where the ranks expect rank 0. They share no secret, so the key keeps two jobs apart,
        # but no stranger out.
        server = Server(f"{address}:{port}", f"{_slurm_ids(os.environ)} {port}")
        if world.rank == 0:
            serve_beside(world, port, server.key)
    return Coordinator(world, server, answer_s=timeout_s)


def address_of_rank_0(world: World, env: Mapping[str, str]) -> tuple[str, int]:
    """Where the ranks expect rank 0: by the user's MASTER_ADDR and MASTER_PORT, else by Slurm's variables.

    Slurm's port is computed from job and step, in [20000, 52767], because nothing can carry the number of a
    free port from rank 0 to the others. Two steps on one host seldom get the same port.
    """
    address, port = env.get("MASTER_ADDR", ""), sockets.port_in(env)
    if world.launcher.name == "slurm":
        from mpiddp.hosts.names import expand_nodelist

        port = port or 20000 + crc32(_slurm_ids(env).encode()) % 32768
        nodelist = env.get("SLURM_STEP_NODELIST", "")
        try:
            first, *others = [address] if address else expand_nodelist(nodelist)
        except ValueError as error:
            raise UserError(
                f'SLURM_STEP_NODELIST="{shown(nodelist)}" is not that of a Slurm step: {error}. '
                "Start the job with srun, or set MASTER_ADDR and MASTER_PORT."
            ) from None
        address = first if address or others else result.LOOPBACK
    elif not (address and env.get("MASTER_PORT")):
        raise UserError(
            f"RANK={world.rank} and WORLD_SIZE={world.world_size} are set. Without MPI, the ranks need "
            "MASTER_ADDR and MASTER_PORT as well, to find each other."
        )
    # Over several hosts, a name that leads to 127.0.1.1 on rank 0's own host is another address.
    is_on_one_host = world.local_world_size == world.world_size or address.startswith("127.")
    return sockets.resolve(address) if is_on_one_host else sockets.resolve_own(address), port


def _slurm_ids(env: Mapping[str, str]) -> str:
    return f"{env.get('SLURM_JOB_ID', '')} {env.get('SLURM_STEP_ID', '')}"


def _place(world: World, infos: Infos, gather: Gather) -> tuple[str, int, socket.socket | None]:
    """Where torch's store is: the first address of rank 0 that every other host reaches, and its port.

    One rank of each host tries them all. Rank 0 listens on every candidate before the ranks hear of it, so
    that no other program takes its port.
    """
    known = world.master_addr
    if known is not None and os.environ.get(AGENT_STORE) == "True":
        return known, world.master_port or 0, None
    listeners: dict[str, socket.socket] = {}

    def listen() -> dict[str, int]:
        for address in [known] if known else result.choose(infos, os.environ):
            port = 0 if known else sockets.port_in(os.environ)  # the channel has the known one
            listeners[address] = sockets.bind(address, port, world.hostname)
        return {address: each.getsockname()[1] for address, each in listeners.items()}

    ports: dict[str, int] = _from_rank_0(world, gather, listen)
    _, *others = [ranks[0] for ranks in result.ranks_by_host(infos).values()]
    tries = world.rank in others
    reached = gather(sockets.reachable([*ports], [*ports.values()]) if tries else [*ports])
    found = next((each for each in ports if all(each in some for some in reached)), None)
    if found is None:
        cut_off = [rank for rank in others if not reached[rank]] or others
        raise JobFailed(
            f"{', '.join(infos[rank].hostname for rank in cut_off)} cannot reach any address of "
            f"{infos[0].hostname} ({', '.join(ports)}) within {sockets.PROBE_TIMEOUT_S:g} s: "
            "a firewall blocks them, or the networks are not connected. "
            "Name a reachable address: --master-addr ADDR"
        )
    listener = listeners.pop(found, None)
    for other in listeners.values():
        other.close()
    if listener is not None:
        # Accept and close the attempts in the backlog, so that the store sees only its clients. None connects
        # before all ranks have met.
        listener.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                listener.accept()[0].close()
        listener.setblocking(True)
    return found, ports[found], listener


def _places(world: World, infos: Infos) -> str:
    """Where the ranks are, and why rank 0's address is not that of its name."""
    name, line = world.hostname, f"master address {world.master_addr} port {world.master_port}"
    with contextlib.suppress(OSError):
        own = socket.gethostbyname(name) if world.num_nodes != 1 else ""
        if own.startswith("127."):  # as Debian's
            line += f": {name}'s own name resolves to {own}, which no other host can reach"
    return f"{result.table(infos)}\n{line}\n"


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


def _serve_beside_agent(world: World, timeout_s: float) -> Server:
    """Rank 0 writes into the store of torchrun's agent where it serves the channel."""
    from mpiddp.runtime.patches import no_dns
    from mpiddp.runtime.rendezvous.store import connect_to_store, prefix_of_attempt

    with no_dns():
        store = connect_to_store(world, timeout_s)
        name = f"{prefix_of_attempt()}/channel"
        if world.rank == 0:
            store.set(name, " ".join(serve_beside(world)))
        try:
            address, key = store.get(name).decode().split()
            return Server(address, key)
        except RuntimeError:
            raise JobFailed(
                f"rank {world.rank} on {world.hostname}: no answer from rank 0 in {timeout_s:g} s."
            ) from None


def joining_timeout_s() -> float:
    """The seconds in which all ranks must join. Raises UserError if the user's value is no duration."""
    try:
        return parse_duration(os.environ.get(TIMEOUT) or f"{JOIN_TIMEOUT_S}")
    except ValueError as error:
        raise UserError(f"{TIMEOUT}: {error}.") from None
