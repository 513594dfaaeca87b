"""Which of this machine's networks carries the job's own traffic: the requested one, or the one that
leads to the other hosts."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_network

from mpiddp.errors import UserError
from mpiddp.hosts.interfaces import Interface, interfaces


def requested_interfaces(requested: str) -> tuple[Interface, ...]:
    """This machine's interfaces that --interface selects: by name, address or network.

    Raises:
        UserError: it selects none.
    """
    present = interfaces()
    found = tuple(interface for interface in present if interface.matches(requested))
    if not found:
        names = " and ".join(f"{each.name} ({each.address})" for each in present)
        raise UserError(
            f'interface "{requested}" is not on {socket.gethostname()}, which has {names}.'
        )
    return found


@dataclass(frozen=True)
class Link:
    """The interface that leads to all other hosts. `is_direct`: they are in the same network."""

    interface: Interface
    is_direct: bool


def link_to(hosts: Sequence[str]) -> Link | None:
    """How this machine reaches all of `hosts`; None when no single interface leads to all of them.

    The kernel's routing table answers; nothing is sent.
    """
    routes = {_route(host) for host in hosts}
    own = {route[0] if route else None for route in routes}
    for interface in interfaces():
        if own == {interface.address} and not interface.is_loopback:
            network = ip_network(interface.network)
            is_direct = all(route and ip_address(route[1]) in network for route in routes)
            return Link(interface, is_direct)
    return None


def address_towards(host: str) -> str | None:
    """This machine's own address on the way to `host`; None if there is no way."""
    route = _route(host)
    return route[0] if route else None


def _route(host: str) -> tuple[str, str] | None:
    """Own address and the host's, as a connection to it would have them."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except (OSError, UnicodeError):  # not resolved, or no route
            return None
        return str(probe.getsockname()[0]), str(probe.getpeername()[0])
