"""The network of a job: a Request and the facts of its hosts come in, and it goes out with the network.

It has this machine's interface, the networks that MPI uses on all hosts, and each host's address in them.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping
from contextlib import suppress
from ipaddress import ip_address, ip_network

from mpiddp.errors import UserError
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.interfaces import Interface, interfaces
from mpiddp.hosts.names import addresses_of, is_this_host
from mpiddp.launch.plan.command import Request
from mpiddp.launch.plan.preflight import HostInfo


def find_network(
    request: Request, infos: Mapping[Host, HostInfo], named: str | None, *, dry_run: bool = False
) -> Request:
    """The request with the network that its hosts share, by --interface (`named`) or the preflight's results.

    Each host's address in it is that of its own interfaces. Raises UserError if no address is known that the
    others can reach, unless nothing is to be started.
    """
    names = {host.key: host.name for host in request.hosts.hosts}
    others = {key: name for key, name in names.items() if not is_this_host(name)}
    by_key = {host.key: info for host, info in infos.items() if host.key in names}
    logins = {key: by_key[key].address for key in others if key in by_key}
    by_family = [
        [_route(name, logins.get(key, ""), family) for key, name in others.items()]
        for family in (socket.AF_INET, socket.AF_INET6)
    ]
    # All addresses are of one family: IPv4, unless it leads to fewer hosts, or through routers that no login
    # of the preflight has passed.
    near = [ip_network(interface.network) for interface in interfaces()]
    passed = {*logins.values()}

    def worth(routes: list[tuple[str, str] | None]) -> tuple[int, int]:
        ends = [route[1] for route in routes if route]
        are_sure = [end in passed or any(ip_address(end) in box for box in near) for end in ends]
        return len(ends), sum(are_sure)

    routes = max(by_family, key=worth)
    if named is None:
        interface, networks = _shared_network(routes, by_key.values())
    else:
        interface, networks = requested_network(named)
    address = "127.0.0.1"
    if others:
        address = interface.address if interface else next((ends[0] for ends in routes if ends), "")
    if not address and not dry_run:
        sentence = f"no address of this machine is known that {[*others.values()][-1]} can reach."
        raise UserError(sentence, fix="--interface NAME, which is this machine's interface to it")
    addresses = {
        name: interface.address for key, name in names.items() if interface and key not in others
    }
    for key, name in others.items():
        for there in by_key[key].interfaces if interface and key in by_key else ():
            is_of_family = (":" in there.address) == (":" in address)
            if is_of_family and any(map(there.matches, networks)):
                addresses.setdefault(name, there.address)
    return request._replace(
        interface=interface, networks=networks, control_address=address, addresses=addresses
    )


def requested_network(requested: str) -> tuple[Interface, tuple[str, ...]]:
    """This machine's interface of --interface, and the names or networks that mean it on every host."""
    present = interfaces()
    matching = [interface for interface in present if interface.matches(requested)]
    if not matching:
        names = " and ".join(dict.fromkeys(interface.name for interface in present))
        here = f"on {socket.gethostname()}, which has {names}"
        raise UserError(f'interface "{requested}" is not {here}.', fix="name one of these, or none")
    if requested in [interface.address for interface in matching]:
        # The other hosts have other addresses in the same network.
        return matching[0], tuple(interface.network for interface in matching)
    return matching[0], tuple(requested.split(","))


def _shared_network(
    routes: Collection[tuple[str, str] | None], infos: Collection[HostInfo]
) -> tuple[Interface | None, tuple[str, ...]]:
    """This machine's interface of all routes to the others, and its network if they are all in it."""
    sources = {route[0] if route else None for route in routes}
    present = interfaces() if len(sources) == 1 else []
    names = [here.name for here in present if here.address in sources and not here.is_loopback]
    elsewhere = [{(there.name, there.network) for there in info.interfaces} for info in infos]
    # IPv4 comes first, even if ssh uses IPv6, because gloo takes the IPv4 address of an interface with both.
    for here in [interface for interface in present if interface.name in names]:
        network, is_source = ip_network(here.network), here.address in sources
        if is_source and not all(route and ip_address(route[1]) in network for route in routes):
            return here, ()
        if elsewhere and all((here.name, here.network) in pairs for pairs in elsewhere):
            # Open MPI 5 warns about a network if a host also has IPv6, but not about an interface's name.
            return here, (here.name,)
        if is_source:
            return here, (here.network,)
    return None, ()


def _route(name: str, login: str, family: socket.AddressFamily) -> tuple[str, str] | None:
    """This machine's address and the host's, as a connection would have them; None without a route.

    A name may be an alias that only ssh knows: `login` is the address to which ssh has connected. Nothing is sent.
    """
    addresses = [address[0] for version, address in addresses_of(name) if version == family]
    for address in filter(None, [*addresses, login]):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as packet:
            packet.connect((address, 9))  # it fails without an address of this family, or a route
            return str(packet.getsockname()[0]), str(packet.getpeername()[0])
    return None
