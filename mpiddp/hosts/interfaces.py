"""The network interfaces of this host.

Standard library only: the launcher sends this file to other hosts.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import re
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

# linux/sockios.h and linux/if.h
_SIOCGIFFLAGS, _SIOCGIFADDR, _SIOCGIFNETMASK = 0x8913, 0x8915, 0x891B
_IFF_UP, _IFF_RUNNING = 0x1, 0x40

# Bridges of containers and virtual machines. They have the same address on every host and reach none. Those
# of Docker end with twelve digits, and br-ex of Open vSwitch is a network of hosts.
_VIRTUAL = re.compile("(docker|virbr|br-[0-9a-f]{12}$|cni|flannel|lxcbr|lxdbr|podman)")


def resolved(name: str) -> list[tuple[socket.AddressFamily, tuple[Any, ...]]]:
    """The families and addresses of a host by its name or its address, IPv4 first, with port 0.

    Raises OSError if no name server answers, or none knows the name.
    """
    try:
        answers = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except UnicodeError:  # an invalid name, such as "a..b"
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known") from None
    addresses = dict.fromkeys((family, address) for family, _, _, _, address in answers)
    return sorted(addresses, key=lambda pair: pair[0])


class Interface(NamedTuple):
    """An interface that is up, with one of its addresses: the first IPv4 one, or a global IPv6 one."""

    name: str
    address: str
    network: str  # CIDR: "10.0.0.0/24"

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback

    def matches(self, requested: str) -> bool:
        """Whether one of `requested`, separated by commas, is its name, its address or its network."""
        address, names = ipaddress.ip_address(self.address), (self.name, self.address)
        for request in requested.split(","):
            with suppress(ValueError):  # not a network
                if request in names or (
                    "/" in request and address in ipaddress.ip_network(request, False)
                ):
                    return True
        return False

    @property
    def is_virtual(self) -> bool:
        return bool(_VIRTUAL.match(self.name))


def interfaces() -> list[Interface]:
    """The interfaces of this host that are up and have an address, in the kernel's order: IPv4, then IPv6."""
    present: list[Interface] = []
    up = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(
                OSError
            ):  # no address of this family, or the interface has just been removed
                flags = _ioctl(probe, _SIOCGIFFLAGS, name)
                if ~struct.unpack_from("H", flags, 16)[0] & (_IFF_UP | _IFF_RUNNING):
                    continue
                up.append(name)
                answers = [
                    _ioctl(probe, request, name) for request in (_SIOCGIFADDR, _SIOCGIFNETMASK)
                ]
                parsed = ipaddress.ip_interface(
                    "/".join(socket.inet_ntoa(answer[20:24]) for answer in answers)
                )
                present.append(Interface(name, str(parsed.ip), str(parsed.network)))
    return present + [interface for interface in _ipv6_interfaces() if interface.name in up]


def machine(*namespaces: str) -> str:
    """An identity of this host that needs no name: its boot, and its namespaces, such as "net"."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return " ".join([boot, *(os.readlink(f"/proc/self/ns/{name}") for name in namespaces)])
    return ""


def own_addresses() -> list[str]:
    """All IPv4 addresses of this host, including the second and later ones of an interface. Some stand twice."""
    with suppress(OSError):
        return re.findall(
            r"\|-- (\S+)\n\s+/32 host LOCAL", Path("/proc/net/fib_trie").read_text("utf-8")
        )
    return []


def _ioctl(probe: socket.socket, request: int, name: str) -> bytes:
    return fcntl.ioctl(probe, request, struct.pack("256s", name.encode()[:15]))


def _ipv6_interfaces() -> list[Interface]:
    """The global IPv6 addresses of this host, with an interface for each."""
    table = Path("/proc/net/if_inet6")
    present = []
    for line in table.read_text(encoding="utf-8").splitlines() if table.exists() else ():
        digits, _, prefix, scope, _, name = line.split()
        # Global. A link-local address needs a zone, which other hosts do not share.
        if scope == "00":
            address = ipaddress.IPv6Address(int(digits, 16))
            network = ipaddress.ip_network(f"{address}/{int(prefix, 16)}", strict=False)
            present.append(Interface(name, str(address), str(network)))
    return present
