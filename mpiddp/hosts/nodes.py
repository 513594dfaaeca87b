"""The nodes of a job: the name under which mpirun gets each host, and whether a host is this machine.

mpirun gets this machine under its own host name, so that it does not use ssh to reach it.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mpiddp.errors import UserError
from mpiddp.hosts.hostfile import Host, Hosts


@dataclass(frozen=True)
class Node:
    """A host with its number of ranks, under the name that mpirun gets.

    `user` and `port` are ssh's; None means ssh's own default. `gpus` are those of its hostfile entry.
    """

    name: str
    ranks: int
    user: str | None = None
    port: int | None = None
    gpus: tuple[int, ...] | None = None


_RESOLVED_ONE_BY_ONE, _RESOLVERS = 2, 256


class UnusableHosts(UserError):
    """Hosts that cannot be used. `complaints` has a sentence for each, with the command that fixes it.

    `hint` follows all of them, "" for nothing.
    """

    def __init__(self, complaints: Mapping[Host, str], hint: str = "") -> None:
        super().__init__("\n".join([*complaints.values(), *([hint] if hint else [])]))
        self.complaints = complaints


@cache
def is_this_host(name: str) -> bool:
    """Whether `name` is the machine that this process runs on."""
    if name.lower() in ("localhost", socket.gethostname().lower()):
        return True
    return any(_is_own_address(family, address) for family, address in addresses_of(name))


@cache
def addresses_of(name: str) -> tuple[tuple[socket.AddressFamily, tuple[Any, ...]], ...]:
    """The families and addresses of a host, with port 0. Empty if the name does not resolve."""
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # UnicodeError for an invalid name
        return ()
    return tuple((family, address) for family, _, _, _, address in found)


def forget_addresses() -> None:
    """Resolve names again: a host may have got its name since."""
    addresses_of.cache_clear()
    is_this_host.cache_clear()


def resolve_all(names: Collection[str]) -> None:
    """Resolve the names at the same time: a name server that does not answer costs seconds for each."""
    if len(names) <= _RESOLVED_ONE_BY_ONE:
        return
    from concurrent.futures import ThreadPoolExecutor  # 5 ms

    with ThreadPoolExecutor(_RESOLVERS) as threads:
        list(threads.map(addresses_of, names))


def _is_own_address(family: socket.AddressFamily, address: tuple[object, ...]) -> bool:
    """Whether a socket can bind to `address`: a machine binds only to its own. Nothing is sent."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            if not _binds_to_any(family):
                probe.bind(address)
                return True
            # Binding proves nothing here. The source address of a packet to it does: the same
            # address, or the loopback.
            probe.connect((address[0], 9, *address[2:]))
        except OSError:
            return False
        return probe.getsockname()[0] in (address[0], "127.0.0.1", "::1")


def _binds_to_any(family: socket.AddressFamily) -> bool:
    """Whether this machine may bind to addresses that it does not have, as a load balancer does."""
    version = "ipv6" if family == socket.AF_INET6 else "ipv4"
    try:
        return Path(f"/proc/sys/net/{version}/ip_nonlocal_bind").read_text().strip() == "1"
    except OSError:
        return False


def name_nodes(
    hosts: Hosts, ranks_of_hosts: Sequence[tuple[Host, int]], own_name: str
) -> tuple[Node, ...]:
    """The hosts under their names for mpirun. This machine gets `own_name`.

    Every mpirun recognizes its own host by that name and does not use ssh to reach it.

    Args:
        ranks_of_hosts: the hosts that take ranks, each with its number of ranks.

    Raises:
        UserError: two of the hosts are this machine, or one is given by an IPv6 address.
    """
    nodes: list[Node] = []
    here: Host | None = None
    for host, ranks in ranks_of_hosts:
        if not is_this_host(host.name):
            if ":" in host.name:
                raise UserError(
                    f"{hosts.where(host)}: {host.name} is an IPv6 address, which every mpirun cuts at "
                    "its first colon. Use a name that resolves to an IPv4 address."
                )
            nodes.append(Node(host.name, ranks, host.user, host.port, host.gpus))
            continue
        if here is not None:
            raise UserError(
                f"{hosts.where(host)}: {here.name} and {host.name} are both this machine. "
                "Merge them into one."
            )
        here = host
        nodes.append(Node(own_name, ranks, gpus=host.gpus))
    return tuple(nodes)


def ranks_by_host(nodes: Sequence[Node]) -> list[str]:
    """One line per host with its ranks: "node1: ranks 0-3"."""
    lines, first = [], 0
    for node in nodes:
        last = first + node.ranks - 1
        ranks = f"rank {first}" if node.ranks == 1 else f"ranks {first}-{last}"
        lines.append(f"{node.name}: {ranks}")
        first = last + 1
    return lines
