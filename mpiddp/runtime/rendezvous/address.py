"""Where rank 0 is: at an address that the ranks know beforehand, or at one that they choose.

Under torchrun, srun, env:// and alone, the variables tell it. Over MPI it follows from the RankInfos of all
ranks: it is the first address of rank 0's host that every other host reaches.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mpiddp.errors import JobFailed, UserError
from mpiddp.hosts.interfaces import Interface
from mpiddp.hosts.sockets import PROBE_TIMEOUT_S, bind, port_in, resolve, resolve_own
from mpiddp.protocol.variables import AGENT_STORE
from mpiddp.runtime.rendezvous.result import RankInfo, ranks_by_host, requested_interface
from mpiddp.text import parse_whole, shown
from mpiddp.world import World

LOOPBACK = "127.0.0.1"


def find_by_address(world: World, timeout_s: float) -> tuple[World, socket.socket | None]:
    """The master address from the environment or from Slurm's variables, and rank 0's listener there."""
    env = os.environ
    address, port = env.get("MASTER_ADDR", ""), port_in(env)
    if world.world_size == 1 and world.launcher.name != "torchrun":
        address = LOOPBACK
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
            address = first if others else LOOPBACK
    except ValueError as error:
        found = ", ".join(f"{name}={shown(env.get(name, ''))}" for name in names)
        raise UserError(
            f'{found} and SLURM_STEP_NODELIST="{shown(nodelist)}" are not those of a Slurm step: {error}. '
            "Start the job with srun, or set MASTER_ADDR and MASTER_PORT."
        ) from None
    return address, port


def check_interface(infos: Sequence[RankInfo], requested: str) -> None:
    """Refuse a host of a rank that has no such interface."""
    for info in infos:
        if not any(interface.matches(requested) for interface in info.interfaces):
            names = " and ".join(interface.name for interface in info.interfaces)
            raise UserError(
                f'interface "{requested}" is not on {info.hostname}, which has {names or "none"}. '
            )


def choose(infos: Sequence[RankInfo], env: Mapping[str, str]) -> list[str]:
    """The addresses on which rank 0 can listen, best first.

    MASTER_ADDR and MPIDDP_INTERFACE are honoured. So is MPIDDP_NETWORKS, in which the launcher names the
    networks that lead to the other hosts. On a single host the store listens on the loopback, so that no
    other host can reach it. Over several hosts no candidate is a loopback, a bridge of containers, or an
    address that another host has as well. Raises UserError if none is left.
    """
    by_host = ranks_by_host(infos)
    for ranks in by_host.values():
        first, local_ranks = infos[ranks[0]], [infos[rank].local_rank or 0 for rank in ranks]
        size = first.local_world_size or 0
        if sorted(local_ranks) != list(range(size)):
            raise UserError(
                f"{first.hostname} runs {len(local_ranks)} ranks with local ranks "
                f"{', '.join(map(str, local_ranks))}; expected 0 to {size - 1}. "
                "Is one machine in the hostfile under two names?"
            )
    if name := env.get("MASTER_ADDR"):
        address = resolve(name)
        if len(by_host) == 1 or not ipaddress.ip_address(address).is_loopback:
            return [address]
    elif len(by_host) == 1:
        return [LOOPBACK]
    return _shared([infos[ranks[0]] for ranks in by_host.values()], requested_interface(env))


def _shared(one_per_host: Sequence[RankInfo], requested: str) -> list[str]:
    """Rank 0's addresses. Networks that all other hosts share come first, then IPv4."""
    master, *others = one_per_host
    if requested:
        check_interface(one_per_host, requested)
    elsewhere = {each.address for info in others for each in info.interfaces}
    networks = [{each.network for each in info.interfaces} for info in others]

    def order(interface: Interface) -> tuple[int, bool]:
        return -sum(interface.network in each for each in networks), ":" in interface.address

    def is_usable(interface: Interface) -> bool:
        if requested:
            return interface.matches(requested)
        return not (interface.is_virtual or interface.address in elsewhere)

    usable = [each for each in master.interfaces if not each.is_loopback and is_usable(each)]
    if not usable:
        raise UserError(
            f"{master.hostname}, where rank 0 runs, has no address that other hosts can reach: "
            f"only {', '.join(f'{i.name} {i.address}' for i in master.interfaces) or 'none'}. "
            "Name one: --master-addr ADDR"
        )
    return [each.address for each in sorted(usable, key=order)]


def unreachable(
    infos: Sequence[RankInfo], addresses: Sequence[str], reached: Sequence[Sequence[str]]
) -> str:
    """The sentence that names the hosts which reach none of rank 0's addresses. `reached` is by rank."""
    firsts = [ranks[0] for ranks in ranks_by_host(infos).values()][1:]
    cut_off = [rank for rank in firsts if not reached[rank]] or firsts
    return (
        f"{', '.join(infos[rank].hostname for rank in cut_off)} cannot reach any address of "
        f"{infos[0].hostname} ({', '.join(addresses)}) within {PROBE_TIMEOUT_S:g} s: "
        "a firewall blocks them, or the networks are not connected. "
        "Name a reachable address: --master-addr ADDR"
    )


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
