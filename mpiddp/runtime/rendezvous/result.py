"""What the ranks know of each other once they have met: the record of every rank, and the result for all.

A `RankInfo` is what each rank tells the others. The `RendezvousResult` is the same over MPI and by address.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mpiddp.errors import UserError
from mpiddp.hosts.interfaces import Interface, interfaces, own_addresses
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

    @classmethod
    def of_this_process(cls, world: World) -> RankInfo:
        return cls(
            rank=world.rank,
            local_rank=world.local_rank,
            local_world_size=world.local_world_size,
            hostname=world.hostname,
            machine=machine_id(),
            interfaces=tuple(interfaces()),
            addresses=own_addresses(),
            own_address=_own_address(),
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
        addresses = tuple(values["addresses"])
        return cls(**{**values, "interfaces": interfaces, "addresses": addresses})

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
    ranks_of_hosts: dict[tuple[str, str], list[int]] = {}
    for info in infos:
        ranks_of_hosts.setdefault(info.host, []).append(info.rank)
    return tuple(_with_local_rank(info, ranks_of_hosts[info.host]) for info in infos)


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
                f'interface "{requested}" is not on {info.hostname}, which has {names or "none"}.'
            )
