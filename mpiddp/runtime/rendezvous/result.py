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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mpiddp.errors import JobFailed, UserError
from mpiddp.hosts.gpus import VISIBLE
from mpiddp.hosts.interfaces import Interface, interfaces, own_addresses
from mpiddp.hosts.sockets import PROBE_TIMEOUT_S, bind, port_in, resolve
from mpiddp.protocol.variables import INTERFACE, NETWORKS
from mpiddp.runtime.job.connect import Server
from mpiddp.world import World

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class RankInfo:
    """The facts about one rank that all other ranks receive."""

    rank: int
    local_rank: int | None  # None, and the next too, until `with_local_ranks` has counted them
    local_world_size: int | None
    hostname: str
    machine: str  # distinguishes two machines with the same name
    interfaces: tuple[Interface, ...]
    addresses: tuple[str, ...] = ()  # IPv4, of all interfaces
    own_address: str = (
        ""  # the address of this host's own name, resolved on it: 127.0.1.1 on Debian
    )
    problem: str = ""  # why this rank cannot begin
    program: tuple[tuple[str, str], ...] = ()  # the files of its script, and their SHA-256
    gpu: str = ""  # the GPU that it uses, of those that its variables name

    @classmethod
    def of_this_process(
        cls,
        world: World,
        problem: str = "",
        program: Sequence[tuple[str, str]] = (),
    ) -> RankInfo:
        return cls(
            rank=world.rank,
            local_rank=world.local_rank,
            local_world_size=world.local_world_size,
            hostname=world.hostname,
            machine=machine_id(),
            interfaces=tuple(interfaces()),
            addresses=own_addresses(),
            own_address=_own_address(),
            problem=problem,
            program=tuple(program),
            gpu=own_gpu(world, os.environ),
        )

    @property
    def host(self) -> tuple[str, str]:
        return (self.hostname, self.machine)

    @classmethod
    def all_from_json(cls, gathered: Sequence[Mapping[str, Any]]) -> tuple[RankInfo, ...]:
        """The infos of all ranks, in the order of the ranks, from the JSON of `dataclasses.asdict`."""
        return with_local_ranks([cls._from_json(values) for values in gathered])

    @classmethod
    def _from_json(cls, values: Mapping[str, Any]) -> RankInfo:
        interfaces = tuple(Interface(**each) for each in values["interfaces"])
        lists = {
            "interfaces": interfaces,
            "addresses": tuple(values["addresses"]),
            "program": tuple((name, digest) for name, digest in values["program"]),
        }
        return cls(**{**values, **lists})

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


def with_local_ranks(infos: Sequence[RankInfo]) -> tuple[RankInfo, ...]:
    """`infos`, in the order of the ranks, with the local ranks that no launcher has set.

    The ranks of one host are numbered in the order of their ranks.
    """
    ranks_of_hosts = _ranks_of_hosts(infos)
    return tuple(_with_local_rank(info, ranks_of_hosts[info.host]) for info in infos)


def _ranks_of_hosts(infos: Sequence[RankInfo]) -> dict[tuple[str, str], list[int]]:
    """The ranks of each host. The hosts are in the order of their lowest ranks."""
    ranks_of_hosts: dict[tuple[str, str], list[int]] = {}
    for info in infos:
        ranks_of_hosts.setdefault(info.host, []).append(info.rank)
    return ranks_of_hosts


def _with_local_rank(info: RankInfo, on_its_host: Sequence[int]) -> RankInfo:
    counted, size = on_its_host.index(info.rank), len(on_its_host)
    return replace(
        info,
        local_rank=counted if info.local_rank is None else info.local_rank,
        local_world_size=size if info.local_world_size is None else info.local_world_size,
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


def _own_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


@dataclass(frozen=True)
class RendezvousResult:
    """The result that all ranks share.

    `listener` is the socket of rank 0 on which it serves torch's store, bound before it is announced.
    `server` is that of the job channel, which rank 0 starts on `channel_listener`, where no launcher has one.
    """

    world: World
    infos: tuple[RankInfo, ...]
    interface: str
    reason: str
    listener: socket.socket | None
    run_id: str  # the same in all attempts of a job
    server: Server | None = None
    channel_listener: socket.socket | None = None

    @property
    def hostnames(self) -> tuple[str, ...]:
        return tuple(info.hostname for info in self.infos)


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


@dataclass(frozen=True)
class Candidates:
    """The addresses on which rank 0 can listen, best first, and the ranks that must reach them."""

    node_ranks: tuple[int, ...]  # [world_size]
    probers: tuple[int, ...]  # the lowest rank of every host except rank 0's
    addresses: tuple[str, ...]
    reasons: tuple[str, ...]
    port: int  # 0: any
    hostnames: tuple[str, ...]  # [world_size]

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Candidates:
        """From the JSON of `dataclasses.asdict(candidates)`."""
        lists_as_tuples: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        return cls(**lists_as_tuples)

    @property
    def num_nodes(self) -> int:
        return max(self.node_ranks) + 1

    def unreachable(self, reached: Sequence[Sequence[str]]) -> str:
        cut_off = [rank for rank in self.probers if not reached[rank]] or list(self.probers)
        return (
            f"{', '.join(self.hostnames[rank] for rank in cut_off)} cannot reach any address of "
            f"{self.hostnames[0]} ({', '.join(self.addresses)}) within {PROBE_TIMEOUT_S:g} s: "
            "a firewall blocks them, or the networks are not connected. "
            "Name a reachable address: --master-addr ADDR"
        )


def choose(infos: Sequence[RankInfo], env: Mapping[str, str]) -> Candidates:
    """Candidates for the master address, from the RankInfo of every rank and the user's requests in `env`.

    MASTER_ADDR, MASTER_PORT and MPIDDP_INTERFACE are honoured. So is MPIDDP_NETWORKS, in which the
    launcher names the networks that lead to the other hosts. On a single host the store listens on the
    loopback, so that no other host can reach it. Over several hosts no candidate is a loopback, a
    bridge of containers, or an address that another host has as well.

    Raises:
        UserError: no address fits. Only rank 0 calls this, and sends the error to the others.
        JobFailed: no name server answers.
    """
    ranks_of_hosts = _ranks_of_hosts(infos)
    nodes = {host: node for node, host in enumerate(ranks_of_hosts)}
    node_ranks = tuple(nodes[info.host] for info in infos)
    firsts = [ranks[0] for ranks in ranks_of_hosts.values()]
    probers = tuple(firsts[1:])
    first_of_hosts = [infos[rank] for rank in firsts]
    for ranks in ranks_of_hosts.values():
        _check_local_ranks([infos[rank] for rank in ranks])
    port = port_in(env)
    requested = requested_interface(env)
    if env.get("MASTER_ADDR"):
        found = _named(first_of_hosts, env["MASTER_ADDR"], requested)
    elif len(nodes) == 1:
        found = [(LOOPBACK, "all ranks are on one host, and only this host can reach the loopback")]
    else:
        found = _shared(first_of_hosts, requested)
    addresses, reasons = zip(*found, strict=True)
    return Candidates(
        node_ranks, probers, addresses, reasons, port, tuple(c.hostname for c in infos)
    )


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


def _named(
    first_of_hosts: Sequence[RankInfo], name: str, requested: str | None
) -> list[tuple[str, str]]:
    """The address that the user named. Over several hosts, one that resolves to a loopback is replaced."""
    address = resolve(name)
    if ipaddress.ip_address(address).is_loopback and len(first_of_hosts) > 1:
        why = f"{name} resolves to {address}, which no other host can reach"
        return [(own, f"{why}; {reason}") for own, reason in _shared(first_of_hosts, requested)]
    return [(address, "MASTER_ADDR names it")]


def _shared(first_of_hosts: Sequence[RankInfo], requested: str | None) -> list[tuple[str, str]]:
    """Rank 0's addresses and their reasons. Networks that all other hosts share come first."""
    master, *others = first_of_hosts
    if requested:
        check_interface(first_of_hosts, requested)
    elsewhere = {i.address for info in others for i in info.interfaces}
    ranked = []
    for position, interface in enumerate(master.interfaces):
        if interface.is_loopback:
            continue
        if requested:
            if not interface.matches(requested):
                continue
        elif interface.is_virtual or interface.address in elsewhere:
            continue
        sharing = sum(
            any(other.network == interface.network for other in info.interfaces) for info in others
        )
        reason = f"{interface.name} of {master.hostname} is on {interface.network}" + (
            ", as is every other host"
            if sharing == len(others)
            else "; the other hosts reach it through a router"
        )
        if master.own_address.startswith("127."):
            reason = (
                f"{master.hostname}'s own name resolves to {master.own_address}, which no other host "
                f"can reach. Using {interface.address} ({interface.name}); --master-addr overrides. "
                f"{reason}"
            )
        ranked.append((-sharing, ":" in interface.address, position, interface.address, reason))
    if not ranked:
        raise UserError(
            f"{master.hostname}, where rank 0 runs, has no address that other hosts can reach: "
            f"only {', '.join(f'{i.name} {i.address}' for i in master.interfaces) or 'none'}. "
            "Name one: --master-addr ADDR"
        )
    return [(address, reason) for *_, address, reason in sorted(ranked)]


def listen(candidates: Candidates) -> list[socket.socket]:
    """A listening socket for every candidate. Only rank 0 calls this.

    Raises:
        UserError: the port is in use, or the address is not one of this host.
        JobFailed: this host has too few files or too little memory left.
    """
    listeners: list[socket.socket] = []
    try:
        for address in candidates.addresses:
            listeners.append(bind(address, candidates.port, candidates.hostnames[0]))
    except (UserError, JobFailed):
        for each in listeners:
            each.close()
        raise
    return listeners
