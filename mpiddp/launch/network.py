"""The network of a job: the one that the user requests, or the one that leads to the other hosts."""

from __future__ import annotations

import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING

from mpiddp.errors import UserError
from mpiddp.hosts.interfaces import Interface, interfaces
from mpiddp.hosts.nodes import Node, is_this_host

if TYPE_CHECKING:
    from mpiddp.launch.remote.preflight import HostInfo


@dataclass(frozen=True)
class RequestedInterface:
    """--interface: what it means on this machine, and the name or the networks that it means on all hosts."""

    own: tuple[Interface, ...]
    everywhere: str


@dataclass(frozen=True)
class JobNetwork:
    """This machine's interface for the job, and what MPI has to keep to on all hosts, if that is known.

    `control_address` is the one address of this machine that all ranks can reach, None if none is known.
    """

    interface: Interface | None
    networks: tuple[str, ...]
    control_address: str | None


def request_interface(requested: str) -> RequestedInterface:
    """This machine's interfaces that --interface means: by name, address or network.

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
    if requested in [each.address for each in found]:  # other hosts have others there
        return RequestedInterface(found, ",".join(each.network for each in found))
    return RequestedInterface(found, requested)


def find_network(
    nodes: Sequence[Node], requested: RequestedInterface | None, infos: Collection[HostInfo]
) -> JobNetwork:
    """The network that `nodes` share.

    Args:
        requested: an interface that all hosts have; this machine's network of that name they may not have.
        infos: what the hosts told of themselves.
    """
    others = [node.name for node in nodes if not is_this_host(node.name)]
    if requested is not None:
        interface: Interface | None = requested.own[0]
        networks = tuple(requested.everywhere.split(","))
    else:
        interface, networks = _shared_network(others, infos)
    return JobNetwork(interface, networks, _control_address(others, interface))


def _shared_network(
    others: Sequence[str], infos: Collection[HostInfo]
) -> tuple[Interface | None, tuple[str, ...]]:
    link = link_to(others)
    if link is None:
        return None, ()
    if not link.is_direct:
        return link.interface, ()
    own = (link.interface.name, link.interface.network)
    found = [[(each.name, each.network) for each in info.interfaces] for info in infos]
    # Open MPI 5 warns of a network where a host has IPv6 as well, of a name it does not.
    is_everywhere = bool(found) and all(own in names for names in found)
    return link.interface, (own[0] if is_everywhere else own[1],)


def _control_address(others: Sequence[str], interface: Interface | None) -> str | None:
    if not others:
        return "127.0.0.1"
    if interface:
        return interface.address
    return next((address for name in others if (address := address_towards(name))), None)


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
