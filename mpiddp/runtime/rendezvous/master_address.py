"""Choose the master address: the first address of rank 0's host that every other host reaches.

The functions work on the RankInfos of all ranks. Rank 0 listens on every candidate address before it
announces them, and then one rank of every other host tries them all.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpiddp.errors import JobFailed, UserError
from mpiddp.hosts.sockets import PROBE_TIMEOUT_S, bind, port_in, resolve
from mpiddp.runtime.rendezvous.result import (
    LOOPBACK,
    RankInfo,
    check_interface,
    requested_interface,
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
    ranks_of_hosts: dict[tuple[str, str], list[int]] = {}  # in the order of their lowest ranks
    for rank, info in enumerate(infos):
        ranks_of_hosts.setdefault(info.host, []).append(rank)
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
