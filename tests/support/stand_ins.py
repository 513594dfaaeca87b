"""Hosts without ssh, on which a stand-in of a scheduler's own remote program starts the daemons of an MPI."""

from __future__ import annotations

from collections.abc import Iterator

from tests.support import cluster
from tests.support.cluster import Cluster

NO_SSH = "#!/bin/sh\necho 'ssh is not allowed here' >&2; exit 1\n"


def two_hosts_with(program: str, text: str) -> Iterator[Cluster]:
    """Two hosts that share bin/PROGRAM and a bin/ssh that refuses, for a pytest fixture."""
    with cluster.up_or_skip(2) as standing:
        folder = standing.shared / "bin"
        folder.mkdir()
        for name, content in ((program, text), ("ssh", NO_SSH)):
            (folder / name).write_text(content)
            (folder / name).chmod(0o755)
        yield standing
