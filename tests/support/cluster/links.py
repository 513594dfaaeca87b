"""Slow links: the hosts of a cluster send and receive at most so many Mbit/s, until the end of a block.

with links.limited(cluster.hosts, mbit=100):
    ...  # tc's token bucket filter on both ends of each host's link
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from tests.support.cluster.host import Host, configure

LATENCY = "50ms"  # a packet that would wait longer is dropped, as by a switch


def burst_bytes(mbit: float) -> int:
    """The bytes that a link may send at once: for 2 ms, and at least one large packet of the kernel."""
    return max(64 * 1024, int(mbit * 1e6 / 8 * 0.002))


@contextmanager
def limited(hosts: Sequence[Host], *, mbit: float) -> Iterator[None]:
    """Limit the links of these hosts, in each direction."""
    bucket = f"tbf rate {round(mbit * 1e6)}bit burst {burst_bytes(mbit)} latency {LATENCY}"
    with ExitStack() as stack:
        for pid, device in (end for host in hosts for end in _ends(host)):
            configure(pid, [f"qdisc add dev {device} root {bucket}"], "tc")
            stack.callback(configure, pid, [f"qdisc del dev {device} root"], "tc")
        yield


def sent_bytes(host: Host) -> int:
    """The bytes that the host has sent over its link so far: the counter of its interface."""
    return int(host.path(f"/sys/class/net/{host.interface}/statistics/tx_bytes").read_text())


def _ends(host: Host) -> tuple[tuple[int, str], ...]:
    """A process in the network namespace of each end, and the name of the end, which limits its sending."""
    return (host.pid, host.interface), (host.hub_pid, host.port)
