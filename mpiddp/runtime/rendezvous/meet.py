"""The ranks meet: over MPI, or at an address that they know.

    with meet(world, lambda: RankInfo.of_this_process(world)) as (coordinator, variables, listener): ...

A rank's agent comes here, and by hand the rank itself. Both ways have one course: every rank tells the others
who it is, rank 0 compares them and offers the addresses on which it listens, and all take the same one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from functools import partial
from typing import Any

from mpiddp.errors import JobFailed, UserError
from mpiddp.hosts.sockets import bind, port_in, reachable, resolve, resolve_own
from mpiddp.protocol.variables import AGENT_STORE, JOIN_TIMEOUT_S, TIMEOUT, VERBOSE
from mpiddp.runtime.job.connection import Server
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.rendezvous import result
from mpiddp.runtime.rendezvous.channel_process import serve_beside
from mpiddp.runtime.rendezvous.mpi import over_mpi
from mpiddp.runtime.rendezvous.result import Gather, Own, RankInfo
from mpiddp.text import parse_duration, parse_whole, shown
from mpiddp.world import World

_LAUNCHER_HEAD_START_S = 15.0  # the launcher reports missing ranks first: it knows more of them

# The ranks; the variables of each; and rank 0's socket for torch's store, bound before it is announced.
Met = tuple[Coordinator, dict[str, str], socket.socket | None]


@contextlib.contextmanager
def meet(
    world: World, own: Own, launched: Coordinator | None = None, *, keep_mpi: bool = False
) -> Iterator[Met]:
    """Meet the other ranks. All ranks must call this. MPI is finalized after the body, which takes a while.

    `own`, what the others learn of this rank, is called once MPI has begun, and may wait. `launched` is
    connected to the launcher; without one, rank 0 serves the job channel.
    """
    timeout_s = joining_timeout_s() + (_LAUNCHER_HEAD_START_S if launched is not None else 0.0)
    is_alone = world.world_size == 1
    # The ranks of a resource manager, which starts any program, may know rank 0's address already.
    is_named = bool(os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT"))
    has_address = is_named and world.launcher.starts_any_program
    if not world.launcher.speaks_mpi or is_alone or has_address:
        yield _by_address(world, own, launched, timeout_s)
        return
    with over_mpi(world, own, timeout_s, launched, keep_mpi=keep_mpi) as (info, gather):
        infos = _compared(world, info, gather)
        address, port, listener = _place(world, infos, gather)
        world = result.joined(world, infos, address, port)
        if launched is None:
            server = _from_rank_0(world, gather, partial(_serve, world))
            coordinator = Coordinator(world, Server(*server), answer_s=timeout_s)
        else:
            coordinator = launched
            gather(None)  # a script that connects to torch's store before would be drained too
        yield _met(coordinator, world, infos, listener)


def _by_address(world: World, own: Own, launched: Coordinator | None, timeout_s: float) -> Met:
    world, listener = find_by_address(world, timeout_s)
    address, port = str(world.master_addr), world.master_port or 0
    server = None
    if launched is None and world.world_size > 1:
        if os.environ.get(AGENT_STORE) == "True":
            server = _serve_beside_agent(world, timeout_s)
        else:
            # The channel is where the ranks expect rank 0. They share no secret, so the key keeps two jobs
            # apart, but no stranger out.
            ids = [os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
            key = " ".join([*ids, str(port)])
            server = Server(f"{address}:{port}", key)
            if listener is not None:
                serve_beside(listener, key, world.world_size)
                listener = bind(address, 0, world.hostname)
    coordinator = launched or Coordinator(world, server, answer_s=timeout_s)
    info = own()
    gather = partial(coordinator.all_gather_json, timeout_s=timeout_s)
    with coordinator.all_or_none():
        infos = _compared(world, info, gather)
        port = gather(port if listener is None else listener.getsockname()[1])[0]
        world = result.joined(world, infos, address, port)
        requested = result.requested_interface(os.environ)
        if requested and world.num_nodes != 1:
            result.check_interface(infos, requested)
    return _met(coordinator, world, infos, listener)


def find_by_address(world: World, timeout_s: float) -> tuple[World, socket.socket | None]:
    """The master address from the environment or from Slurm's variables, and rank 0's listener there."""
    env = os.environ
    address, port = env.get("MASTER_ADDR", ""), port_in(env)
    if world.world_size == 1 and world.launcher.name != "torchrun":
        address = result.LOOPBACK
    elif world.launcher.name == "slurm":
        address, port = slurm_address(env)
    elif not (address and env.get("MASTER_PORT")):
        raise UserError(
            f"RANK={world.rank} and WORLD_SIZE={world.world_size} are set. Without MPI, the ranks need "
            "MASTER_ADDR and MASTER_PORT as well, to find each other."
        )
    # Over several hosts, a name that leads to 127.0.1.1 on rank 0's own host is another address.
    is_on_one_host = world.local_world_size == world.world_size or address.startswith("127.")
    address = resolve(address) if is_on_one_host else resolve_own(address)
    listener = None
    if world.rank == 0 and env.get(AGENT_STORE) != "True":
        listener = bind(address, port, world.hostname)
        port = listener.getsockname()[1]
    elif not wait_for(address, port, timeout_s):
        raise JobFailed(
            f"rank {world.rank} on {world.hostname} cannot reach rank 0 at {address} port {port} "
            f"in {timeout_s:g} s. Check that rank 0 is running and that no firewall blocks the "
            "port."
        )
    return replace(world, master_addr=address, master_port=port), listener


def slurm_address(env: Mapping[str, str]) -> tuple[str, int]:
    """Rank 0's host and port in this step. The user's MASTER_ADDR and MASTER_PORT are honoured.

    The port is computed from job and step, in [20000, 52767], because nothing can carry the number of a
    free port from rank 0 to the others. Two steps on one host seldom get the same port.
    """
    from mpiddp.hosts.allocations import expand_nodelist

    names = ("SLURM_JOB_ID", "SLURM_STEP_ID")
    nodelist = env.get("SLURM_STEP_NODELIST", "")
    address, port = env.get("MASTER_ADDR"), port_in(env)
    try:
        job, step = (parse_whole(env.get(name) or "0", high=1 << 32) for name in names)
        port = port or 20000 + (job * 31 + step) % 32768
        if not address:
            first, *others = expand_nodelist(nodelist)
            address = first if others else result.LOOPBACK
    except ValueError as error:
        found = ", ".join(f"{name}={shown(env.get(name, ''))}" for name in names)
        raise UserError(
            f'{found} and SLURM_STEP_NODELIST="{shown(nodelist)}" are not those of a Slurm step: {error}. '
            "Start the job with srun, or set MASTER_ADDR and MASTER_PORT."
        ) from None
    return address, port


def wait_for(address: str, port: int, timeout_s: float) -> bool:
    """Whether the port accepts a connection within `timeout_s`. torch's own attempts log every failure."""
    deadline = time.monotonic() + timeout_s
    while (remaining := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((address, port), timeout=remaining).close()
        except OSError:
            time.sleep(min(0.1, remaining))
        else:
            return True
    return False


def _compared(world: World, own: RankInfo, gather: Gather) -> tuple[RankInfo, ...]:
    """The RankInfos of all ranks, which are alike."""
    plain: Any = [astuple(each) for each in own.interfaces]
    infos = result.gathered(gather(own._replace(interfaces=plain)))
    _from_rank_0(world, gather, partial(result.check_alike, infos, os.environ))
    return infos


def _place(
    world: World, infos: Sequence[RankInfo], gather: Gather
) -> tuple[str, int, socket.socket | None]:
    """Where torch's store is: the first address of rank 0 that every other host reaches, and its port.

    One rank of each host tries them all. Rank 0 listens on every candidate before the ranks hear of it, so
    that no other program takes its port.
    """
    listeners: dict[str, socket.socket] = {}

    def listen() -> list[tuple[str, int]]:
        for address in result.choose(infos, os.environ):
            listeners[address] = bind(address, port_in(os.environ), world.hostname)
        return [(address, each.getsockname()[1]) for address, each in listeners.items()]

    ports: dict[str, int] = dict(_from_rank_0(world, gather, listen))
    firsts = [ranks[0] for ranks in result.ranks_by_host(infos).values()]
    tries = world.rank in firsts[1:]
    reached = gather(reachable([*ports], [*ports.values()]) if tries else [*ports])
    found = next((each for each in ports if all(each in some for some in reached)), None)
    if found is None:
        raise JobFailed(result.unreachable(infos, [*ports], reached))
    listener = listeners.pop(found, None)
    for other in listeners.values():
        other.close()
    if listener is not None:
        # Accept and close the attempts in the backlog, so that the store sees only its clients.
        listener.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                listener.accept()[0].close()
        listener.setblocking(True)
    return found, ports[found], listener


def _met(
    coordinator: Coordinator,
    world: World,
    infos: Sequence[RankInfo],
    listener: socket.socket | None,
) -> Met:
    """What the rank knows now. With `launch -v` it prints where the ranks are."""
    env = os.environ
    coordinator.world = world
    coordinator.hostnames = tuple(info.hostname for info in infos)
    requested = result.requested_interface(env)
    interface = infos[world.rank].interface_for(str(world.master_addr), requested)
    if env.get(VERBOSE):
        lines = [f"rank {world.rank} on {world.hostname} uses {interface}\n"]
        if world.rank == 0:
            found, why = "", ""
            name = env.get("MASTER_ADDR") or f"{world.hostname}'s own name"
            with contextlib.suppress(OSError):
                named = env.get("MASTER_ADDR") or world.hostname
                found = socket.gethostbyname(named) if world.num_nodes != 1 else ""
            if found.startswith("127."):  # as Debian's own name of a host
                why = f": {name} resolves to {found}, which no other host can reach"
            address = f"master address {world.master_addr} port {world.master_port}{why}\n"
            lines = [f"{result.table(infos)}\n", address, *lines]
        print("".join(lines), end="", flush=True)
    return coordinator, result.variables_of(world, interface, infos[0].run_id), listener


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


def joining_timeout_s() -> float:
    """The seconds in which all ranks must join. Raises UserError if the user's value is no duration."""
    try:
        return parse_duration(os.environ.get(TIMEOUT) or f"{JOIN_TIMEOUT_S}")
    except ValueError as error:
        raise UserError(f"{TIMEOUT}: {error}.") from None
