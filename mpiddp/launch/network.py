"""The network of a job: the requested one, or the one that leads to the other hosts."""

from __future__ import annotations

import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING

from mpiddp.errors import UserError
from mpiddp.hosts.interfaces import Interface, interfaces
from mpiddp.hosts.nodes import Node, addresses_of, is_this_host

if TYPE_CHECKING:
    from mpiddp.launch.remote.preflight import HostInfo


@dataclass(frozen=True)
class RequestedInterface:
    """--interface: its interfaces on this machine, and the name or the networks that all hosts use."""

    own: tuple[Interface, ...]
    everywhere: str


@dataclass(frozen=True)
class JobNetwork:
    """This machine's interface for the job, and the networks that MPI must use on all hosts, if known.

    `control_address` is the address of this machine that all ranks can reach, None if none is known.
    """

    interface: Interface | None
    networks: tuple[str, ...]
    control_address: str | None


def request_interface(requested: str) -> RequestedInterface:
    """This machine's interfaces that --interface selects, by name, address or network.

    Raises:
        UserError: it selects no interface.
    """
    present = interfaces()
    found = tuple(interface for interface in present if interface.matches(requested))
    if not found:
        names = " and ".join(f"{each.name} ({each.address})" for each in present)
        raise UserError(
            f'interface "{requested}" is not on {socket.gethostname()}, which has {names}.'
        )
    if requested in [
        each.address for each in found
    ]:  # other hosts have other addresses in that network
        return RequestedInterface(found, ",".join(each.network for each in found))
    return RequestedInterface(found, requested)


def find_network(
    nodes: Sequence[Node], requested: RequestedInterface | None, infos: Collection[HostInfo]
) -> JobNetwork:
    """The network that `nodes` share.

    Args:
        requested: an interface that all hosts have, maybe in another network than this machine's.
        infos: the preflight's results.
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
    # Open MPI 5 warns about a network if a host also has IPv6, but not about an interface's name.
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
    """The interface that leads to all other hosts. `is_direct`: all are in its network."""

    interface: Interface
    is_direct: bool


def link_to(hosts: Sequence[str]) -> Link | None:
    """The interface by which this machine reaches all of `hosts`; None if no single one leads to all.

    The result comes from the kernel's routing table. Nothing is sent.
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
    """This machine's own address on the route to `host`; None without a route."""
    route = _route(host)
    return route[0] if route else None


def _route(host: str) -> tuple[str, str] | None:
    """This machine's address and the host's, as a connection to it would have them."""
    found = [address for family, address in addresses_of(host) if family == socket.AF_INET]
    if not found:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((found[0][0], 9))
        except OSError:  # no route
            return None
        return str(probe.getsockname()[0]), str(probe.getpeername()[0])
