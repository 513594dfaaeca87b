"""A real ssh cluster on one machine. Each host is a set of namespaces with its own name, network and sshd.

    with cluster.up(3, layout=Layout(decoys=("docker0",))) as c:
        c["node0"].run(["mpirun", "-np", "3", "-H", "node0,node1,node2", "hostname"])

By hand: `python -m tests.support.cluster 3`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.cluster.host import USER, Host
from tests.support.cluster.layout import PLAIN, Layout
from tests.support.cluster.needs import lacking, why_not
from tests.support.cluster.program import Program
from tests.support.cluster.start import Cluster, up

__all__ = ["USER", "Cluster", "Host", "Layout", "Program", "lacking", "up", "up_or_skip", "why_not"]


@contextmanager
def up_or_skip(count: int = 3, *, layout: Layout = PLAIN) -> Iterator[Cluster]:
    """`up` for a pytest fixture. Skips its tests if this machine cannot run a cluster."""
    if reason := why_not():
        lacking(reason)
    with up(count, layout=layout) as cluster:
        yield cluster
