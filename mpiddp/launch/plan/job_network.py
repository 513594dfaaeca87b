"""The network that the hosts of a job share: this machine's interface, and each host's address in it."""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping
from contextlib import suppress
from ipaddress import ip_address, ip_network

from mpiddp.errors import UserError
from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.hosts.interfaces import Interface, interfaces
from mpiddp.hosts.names import addresses_of, is_this_host
from mpiddp.launch.plan.command import JobNetwork
from mpiddp.launch.plan.preflight import HostInfo


def find_network(
    placed: Hosts, infos: Mapping[Host, HostInfo], requested: str | None, *, dry_run: bool = False
) -> JobNetwork:
    """The network that the hosts share, by --interface (`requested`) or the preflight's results.

    Each host's address in it is that of its own interfaces. Raises UserError if no address is known that the
    others can reach, unless nothing is to be started.
    """
    others = {host.key: host.name for host in placed.hosts if not is_this_host(host.name)}
    here = [host.name for host in placed.hosts if host.key not in others]
    known = {host.key: info for host, info in infos.items()}
    logins = {key: known[key].address for key in others if key in known}
    by_family = [
        [_route(name, logins.get(key, ""), family) for key, name in others.items()]
        for family in (socket.AF_INET, socket.AF_INET6)
    ]
    # All of one family: IPv4, unless it leads to fewer hosts, or through routers that ssh has not passed.
    near = [ip_network(each.network) for each in interfaces()]
    passed = {*logins.values()}

    def worth(routes: list[tuple[str, str] | None]) -> tuple[int, int]:
        ends = [route[1] for route in routes if route]
        are_sure = [end in passed or any(ip_address(end) in each for each in near) for end in ends]
        return len(ends), sum(are_sure)

    routes = max(by_family, key=worth)
    if requested is None:
        interface, networks = _shared_network(routes, known.values())
    else:
        interface, networks = requested_network(requested)
    address = "127.0.0.1"
    if others:
        address = interface.address if interface else next((r[0] for r in routes if r), "")
    if not address and not dry_run:
        raise UserError(
            f"no address of this machine is known that {[*others.values()][-1]} can reach. "
            "Name this machine's interface to it: --interface NAME"
        )
    network = JobNetwork(interface, networks, address)
    addresses = {} if interface is None else dict.fromkeys(here, interface.address)
    for key, name in others.items():
        for each in known[key].interfaces if interface and key in known else ():
            is_ours = (":" in each.address) == (network.other_family == 4)
            if is_ours and any(map(each.matches, networks)):
                addresses.setdefault(name, each.address)
    return network._replace(addresses=addresses)


def requested_network(requested: str) -> tuple[Interface, tuple[str, ...]]:
    """This machine's interface of --interface, and what it is on every host: names, or its networks."""
    present = interfaces()
    found = [interface for interface in present if interface.matches(requested)]
    if not found:
        names = " and ".join(f"{each.name} ({each.address})" for each in present)
        here = socket.gethostname()
        raise UserError(f'interface "{requested}" is not on {here}, which has {names}.')
    if requested in [each.address for each in found]:  # others have other addresses in that network
        return found[0], tuple(each.network for each in found)
    return found[0], tuple(requested.split(","))


def _shared_network(
    routes: Collection[tuple[str, str] | None], infos: Collection[HostInfo]
) -> tuple[Interface | None, tuple[str, ...]]:
    """This machine's interface of all routes to the others, and its network if they are all in it."""
    sources = {route[0] if route else None for route in routes}
    present = interfaces() if len(sources) == 1 else []
    mine = [each.name for each in present if each.address in sources and not each.is_loopback]
    known = [{(each.name, each.network) for each in info.interfaces} for info in infos]
    # IPv4 comes first, also where ssh takes IPv6: it is what gloo takes of an interface with both.
    for own in (each for each in present if each.name in mine):
        network, is_source = ip_network(own.network), own.address in sources
        is_everywhere = known and all((own.name, own.network) in each for each in known)
        if is_source and not all(route and ip_address(route[1]) in network for route in routes):
            return own, ()
        if is_everywhere:
            # Open MPI 5 warns about a network if a host also has IPv6, but not about an interface's name.
            return own, (own.name,)
        if is_source:
            return own, (own.network,)
    return None, ()


def _route(name: str, login: str, family: socket.AddressFamily) -> tuple[str, str] | None:
    """This machine's address and the host's, as a connection would have them; None without a route.

    A name may be an alias that only ssh knows: `login` is the address to which ssh has connected. Nothing is
    sent.
    """
    found = [address[0] for of, address in addresses_of(name) if of == family]
    for address in filter(None, [*found, login]):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as packet:
            packet.connect((address, 9))  # an error: there is no address, or no route
            return str(packet.getsockname()[0]), str(packet.getpeername()[0])
    return None
