"""The hosts of a test cluster: their names, interfaces, addresses and /etc/hosts.

The defaults give a well-configured cluster. Each field of `Layout` adds a property of real clusters that
confuses launchers.
"""

from dataclasses import dataclass
from typing import NamedTuple

# Every cluster has its own unconnected namespaces, so all of them can use the same networks.
NETWORK = "10.77.0"
DEAD_NETWORK = "10.78.0"
DECOY_ADDRESSES = {"docker0": "172.17.0.1/16", "virbr0": "192.168.122.1/24"}


@dataclass(frozen=True)
class Layout:
    """The differences of a cluster from the default.

    interfaces: the names of the hosts' network interfaces, used in turn ("eth0", "ens5", …).
    own_name_is_loopback: each host's own name resolves to 127.0.1.1 on that host, as Debian's installer
        configures it. The other hosts' names resolve to their real addresses.
    decoys: "docker0" and/or "virbr0", with the same address on every host.
    dead_network: a second interface eth1, with an address in 10.78.0.0/24, that loses all packets.
    apart: all hosts but node0 have a root of their own, in memory, with the system's programs (/usr) and
        nothing of this machine besides: no repository, no virtual environment, no shared folder.
    """

    interfaces: tuple[str, ...] = ("eth0",)
    own_name_is_loopback: bool = False
    decoys: tuple[str, ...] = ()
    dead_network: bool = False
    apart: bool = False


PLAIN = Layout()


class Link(NamedTuple):
    """An interface of a host. A link that is not `live` is not connected to the switch."""

    interface: str
    address: str  # with its prefix length: "10.77.0.1/24"
    live: bool


def host_name(index: int) -> str:
    return f"node{index}"


def host_address(index: int) -> str:
    return f"{NETWORK}.{index + 1}"


def host_links(layout: Layout, index: int) -> list[Link]:
    """The interfaces of host number `index`. The first one is connected."""
    first = layout.interfaces[index % len(layout.interfaces)]
    links = [Link(first, f"{host_address(index)}/24", True)]
    if layout.dead_network:
        links.append(Link("eth1", f"{DEAD_NETWORK}.{index + 1}/24", False))
    links += [Link(name, DECOY_ADDRESSES[name], False) for name in layout.decoys]
    return links


def etc_hosts(layout: Layout, index: int, count: int) -> str:
    """The text of /etc/hosts on host number `index` of `count`."""
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
    for number in range(count):
        is_loopback = layout.own_name_is_loopback and number == index
        lines.append(f"{'127.0.1.1' if is_loopback else host_address(number)} {host_name(number)}")
    return "\n".join(lines) + "\n"
