"""What the ranks know of each other once they have met: the record of every rank, and what follows for all.

A `RankInfo` is what each rank tells the others. The `RendezvousResult` is the same over MPI and by address.

Over MPI, the master address follows from the RankInfos of all ranks: it is the first address of rank 0's host
that every other host reaches. Rank 0 listens on every candidate before it announces them. Then one rank of
every other host tries them all.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, NamedTuple

from mpiddp.errors import UserError
from mpiddp.hosts.gpus import VISIBLE
from mpiddp.hosts.interfaces import Interface, interfaces
from mpiddp.hosts.sockets import PROBE_TIMEOUT_S, resolve
from mpiddp.protocol.variables import INTERFACE, NETWORKS
from mpiddp.runtime.job.connect import Server
from mpiddp.world import World

LOOPBACK = "127.0.0.1"


class RankInfo(NamedTuple):
    """The facts about one rank that all other ranks receive.

    local_rank, local_world_size: None until they are counted, see `gathered`. machine: distinguishes two
    machines with the same name. problem: why this rank cannot begin. program: the files of its script, with
    their SHA-256. gpu: the GPU that it uses, of those that its variables name.
    """

    rank: int
    local_rank: int | None
    local_world_size: int | None
    hostname: str
    machine: str
    interfaces: Sequence[Interface]
    problem: str = ""
    program: Sequence[tuple[str, str]] = ()
    gpu: str = ""

    @classmethod
    def of_this_process(
        cls, world: World, problem: str = "", program: Sequence[tuple[str, str]] = ()
    ) -> RankInfo:
        return cls(
            world.rank,
            world.local_rank,
            world.local_world_size,
            world.hostname,
            machine_id(),
            interfaces(),
            problem,
            program,
            own_gpu(world, os.environ),
        )

    @property
    def host(self) -> tuple[str, str]:
        return (self.hostname, self.machine)

    def as_json(self) -> list[Any]:
        """See `gathered`."""
        plain = [astuple(each) for each in self.interfaces]
        return [plain if value is self.interfaces else value for value in self]

    def interface_towards(self, address: str) -> str:
        """The name of this host's interface that carries traffic to `address`, "" if unknown."""
        target = ipaddress.ip_address(address)
        for interface in self.interfaces:
            if target in ipaddress.ip_network(interface.network):
                return interface.name
        family = socket.AF_INET6 if target.version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as route:
            try:
                route.connect((address, 9))  # asks the routing table; sends nothing
            except OSError:
                return ""
            source = route.getsockname()[0]
        return next((i.name for i in self.interfaces if i.address == source), "")


class RendezvousResult(NamedTuple):
    """The result that all ranks share.

    listener: of rank 0, on which torch's store is served, bound before it is announced. run_id: the same in
    all attempts of a job. server, channel_listener: those of the job channel, which rank 0 serves where no
    launcher does.
    """

    world: World
    infos: tuple[RankInfo, ...]
    interface: str
    reason: str
    listener: socket.socket | None
    run_id: str
    server: Server | None = None
    channel_listener: socket.socket | None = None

    @property
    def hostnames(self) -> tuple[str, ...]:
        return tuple(info.hostname for info in self.infos)


def gathered(answers: Iterable[Sequence[Any]]) -> tuple[RankInfo, ...]:
    """The infos of all ranks, by rank, from the JSON of each.

    The local ranks that no launcher has set are counted on each host, in the order of the ranks.
    """
    infos = [RankInfo(*answer) for answer in answers]
    by_host = ranks_by_host(infos)
    found = []
    for info in infos:
        ranks = by_host[info.host]
        local_rank, size = info.local_rank, info.local_world_size
        counted = info._replace(
            interfaces=[Interface(*each) for each in info.interfaces],  # type: ignore[misc]
            local_rank=ranks.index(info.rank) if local_rank is None else local_rank,
            local_world_size=len(ranks) if size is None else size,
        )
        found.append(counted)
    return tuple(found)


def ranks_by_host(infos: Sequence[RankInfo]) -> dict[tuple[str, str], list[int]]:
    """The ranks of each host. The hosts are in the order of their lowest ranks."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for info in infos:
        ranks.setdefault(info.host, []).append(info.rank)
    return ranks


def world_with(world: World, infos: Sequence[RankInfo], address: str, port: int) -> World:
    """`world` with all that its rank learns from the others, and the master address."""
    hosts, own = list(ranks_by_host(infos)), infos[world.rank]
    return replace(
        world,
        local_rank=own.local_rank,
        local_world_size=own.local_world_size,
        node_rank=hosts.index(own.host),
        num_nodes=len(hosts),
        master_addr=address,
        master_port=port,
    )


def machine_id() -> str:
    """What distinguishes this machine from another one with the same name; "" where nothing does."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return boot_id.read_text().strip() if boot_id.exists() else ""


def own_gpu(world: World, env: Mapping[str, str]) -> str:
    """The entry of CUDA_VISIBLE_DEVICES and its kin for this rank; "" if they name none for it."""
    if world.launcher.name == "slurm" or world.local_rank is None:
        return ""  # Slurm's cgroups renumber the GPUs for each task
    visible = next((env[name] for name in VISIBLE if name in env), "").split(",")
    return visible[world.local_rank].strip() if world.local_rank < len(visible) else ""


def requested_interface(env: Mapping[str, str]) -> str | None:
    """The interface or networks that the user, or else the launcher, requests. See `Interface.matches`."""
    return env.get(INTERFACE) or env.get(NETWORKS)


def check_interface(infos: Sequence[RankInfo], requested: str) -> None:
    """Raise a UserError unless the host of every rank has such an interface."""
    for info in infos:
        if not any(interface.matches(requested) for interface in info.interfaces):
            names = " and ".join(interface.name for interface in info.interfaces)
            raise UserError(
                f'interface "{requested}" is not on {info.hostname}, which has {names or "none"}. '
            )


def choose(infos: Sequence[RankInfo], env: Mapping[str, str]) -> list[tuple[str, str]]:
    """The addresses on which rank 0 can listen, best first, each with its reason.

    MASTER_ADDR and MPIDDP_INTERFACE are honoured. So is MPIDDP_NETWORKS, in which the launcher names the
    networks that lead to the other hosts. On a single host the store listens on the loopback, so that no
    other host can reach it. Over several hosts no candidate is a loopback, a bridge of containers, or an
    address that another host has as well.

    Raises:
        UserError: no address fits. Only rank 0 calls this, and sends the error to the others.
        JobFailed: no name server answers.
    """
    by_host = ranks_by_host(infos)
    for ranks in by_host.values():
        _check_local_ranks([infos[rank] for rank in ranks])
    one_per_host = [infos[ranks[0]] for ranks in by_host.values()]
    requested = requested_interface(env)
    if name := env.get("MASTER_ADDR"):
        address = resolve(name)
        if len(by_host) == 1 or not ipaddress.ip_address(address).is_loopback:
            return [(address, "MASTER_ADDR names it")]
        why = f"{name} resolves to {address}, which no other host can reach"
        return [(own, f"{why}; {reason}") for own, reason in _shared(one_per_host, requested)]
    if len(by_host) == 1:
        return [(LOOPBACK, "all ranks are on one host, and only this host can reach the loopback")]
    return _shared(one_per_host, requested)


def _check_local_ranks(infos: Sequence[RankInfo]) -> None:
    """Raise a UserError unless the ranks of one host have the local ranks from 0 on."""
    local_ranks = [info.local_rank for info in infos]
    size = infos[0].local_world_size
    assert size is not None
    if set(local_ranks) != set(range(size)) or len(local_ranks) != size:
        raise UserError(
            f"{infos[0].hostname} runs {len(local_ranks)} ranks with local ranks "
            f"{', '.join(map(str, local_ranks))}; expected 0 to {size - 1}. "
            "Is one machine in the hostfile under two names?"
        )


def _shared(one_per_host: Sequence[RankInfo], requested: str | None) -> list[tuple[str, str]]:
    """Rank 0's addresses and their reasons. Networks that all other hosts share come first."""
    master, *others = one_per_host
    if requested:
        check_interface(one_per_host, requested)
    elsewhere = {i.address for info in others for i in info.interfaces}
    ranked = []
    for position, interface in enumerate(master.interfaces):
        is_usable = not (interface.is_virtual or interface.address in elsewhere)
        if interface.is_loopback or not (interface.matches(requested) if requested else is_usable):
            continue
        sharing = sum(
            any(other.network == interface.network for other in info.interfaces) for info in others
        )
        how = (
            "as is every other host" if sharing == len(others) else "which others reach by a router"
        )
        reason = f"{interface.name} of {master.hostname} is on {interface.network}, {how}"
        ranked.append((-sharing, ":" in interface.address, position, interface.address, reason))
    if not ranked:
        raise UserError(
            f"{master.hostname}, where rank 0 runs, has no address that other hosts can reach: "
            f"only {', '.join(f'{i.name} {i.address}' for i in master.interfaces) or 'none'}. "
            "Name one: --master-addr ADDR"
        )
    why = _why_not_own_name(master.hostname)
    return [(address, f"{why}{reason}") for *_, address, reason in sorted(ranked)]


def _why_not_own_name(hostname: str) -> str:
    """The beginning of a reason on a host of Debian's, where the host's own name is a loopback; else ""."""
    try:
        address = socket.gethostbyname(hostname)
    except OSError:
        return ""
    if not address.startswith("127."):
        return ""
    return f"{hostname}'s own name resolves to {address}, which no other host can reach; "


def unreachable(
    infos: Sequence[RankInfo], addresses: Sequence[str], reached: Sequence[Sequence[str]]
) -> str:
    """The sentence that names the hosts which reach none of rank 0's addresses.

    Args:
        reached: the addresses that each rank has reached: [world_size].
    """
    firsts = [ranks[0] for ranks in ranks_by_host(infos).values()][1:]
    cut_off = [rank for rank in firsts if not reached[rank]] or firsts
    return (
        f"{', '.join(infos[rank].hostname for rank in cut_off)} cannot reach any address of "
        f"{infos[0].hostname} ({', '.join(addresses)}) within {PROBE_TIMEOUT_S:g} s: "
        "a firewall blocks them, or the networks are not connected. "
        "Name a reachable address: --master-addr ADDR"
    )
