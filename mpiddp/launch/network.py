"""The network of a job: the requested one, or the one that leads to the other hosts."""

from __future__ import annotations

import socket
from collections.abc import Collection
from ipaddress import ip_address, ip_network

from mpiddp.errors import UserError
from mpiddp.hosts.hostfile import Hosts
from mpiddp.hosts.interfaces import Interface, interfaces
from mpiddp.hosts.names import addresses_of, is_this_host
from mpiddp.launch.preflight import HostInfo
from mpiddp.launch.starters.command import JobNetwork

_Route = tuple[str, str]  # this machine's address and the host's, as a connection would have them


def requested_networks(requested: str) -> tuple[str, ...]:
    """What --interface means on every host: the names or networks of interfaces."""
    own = _own_interfaces(requested)
    if requested in [each.address for each in own]:  # others have other addresses in that network
        return tuple(each.network for each in own)
    return tuple(requested.split(","))


def find_network(
    placed: Hosts, infos: Collection[HostInfo], requested: str | None, *, dry_run: bool = False
) -> JobNetwork:
    """The network that the hosts share, by --interface (`requested`) or the preflight's results."""
    others = [host.name for host in placed.hosts if not is_this_host(host.name)]
    routes = [_route(name) for name in others] if requested is None else []
    if requested is None:
        interface, networks = _shared_network(routes, infos)
    else:  # all hosts have it, maybe in different networks
        interface, networks = _own_interfaces(requested)[0], requested_networks(requested)
    address = "127.0.0.1"
    if others:
        address = interface.address if interface else next((r[0] for r in routes if r), "")
    if not address and not dry_run:
        raise UserError(
            f"no address of this machine is known that {others[-1]} can reach. "
            "Name this machine's interface to it: --interface NAME"
        )
    return JobNetwork(interface, networks, address)


def _own_interfaces(requested: str) -> list[Interface]:
    present = interfaces()
    if found := [interface for interface in present if interface.matches(requested)]:
        return found
    names = " and ".join(f"{each.name} ({each.address})" for each in present)
    raise UserError(f'interface "{requested}" is not on {socket.gethostname()}, which has {names}.')


def _shared_network(
    routes: Collection[_Route | None], infos: Collection[HostInfo]
) -> tuple[Interface | None, tuple[str, ...]]:
    """This machine's interface of all routes to the others, and its network if they are all in it."""
    sources = {route[0] if route else None for route in routes}
    present = interfaces() if len(sources) == 1 else []
    found = [each for each in present if each.address in sources and not each.is_loopback]
    if not found:
        return None, ()
    own = found[0]
    network = ip_network(own.network)
    if not all(route and ip_address(route[1]) in network for route in routes):
        return own, ()
    names = [[(each.name, each.network) for each in info.interfaces] for info in infos]
    # Open MPI 5 warns about a network if a host also has IPv6, but not about an interface's name.
    is_everywhere = bool(names) and all((own.name, own.network) in each for each in names)
    return own, (own.name if is_everywhere else own.network,)


def _route(name: str) -> _Route | None:
    """The route to a host by the kernel's table, None without one. Nothing is sent."""
    found = [address for family, address in addresses_of(name) if family == socket.AF_INET]
    if not found:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as packet:
        try:
            packet.connect((found[0][0], 9))
        except OSError:  # no route
            return None
        return str(packet.getsockname()[0]), str(packet.getpeername()[0])
