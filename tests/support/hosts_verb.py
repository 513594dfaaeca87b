"""`mpiddp hosts VERB`, on hosts whose file systems are apart."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import CompletedProcess

from tests.support import cluster
from tests.support.cluster import Cluster, Layout
from tests.support.ranks import ROOT

HOSTS = [sys.executable, "-m", "mpiddp", "hosts"]


@contextmanager
def three_hosts_apart() -> Iterator[Cluster]:
    """node0, node1 and node2, which the file "hosts" in their shared folder lists."""
    with cluster.up_or_skip(3, layout=Layout(apart=True)) as standing:
        (standing.shared / "hosts").write_text("node0\nnode1\nnode2\n")
        yield standing


def on_node0(
    hosts: Cluster, verb: str, *arguments: object, file: str = "hosts"
) -> CompletedProcess[str]:
    """Run `mpiddp hosts VERB FILE ARGUMENTS…` there. The file lies in the shared folder."""
    command = [*HOSTS, verb, str(hosts.shared / file), *map(str, arguments)]
    return hosts["node0"].run(command, cwd=ROOT)
