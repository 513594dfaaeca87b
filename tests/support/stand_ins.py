"""Hosts without ssh, on which a stand-in of a scheduler's own remote program starts the daemons of an MPI."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.support import cluster
from tests.support.cluster import Cluster

NO_SSH = "#!/bin/sh\necho 'ssh is not allowed here' >&2; exit 1\n"


@contextmanager
def two_hosts_with(program: str, text: str, script: str) -> Iterator[Cluster]:
    """Two hosts that share bin/PROGRAM, a bin/ssh that refuses, and show.py, for a pytest fixture."""
    with cluster.up_or_skip(2) as standing:
        folder = standing.shared / "bin"
        folder.mkdir()
        for name, content in ((program, text), ("ssh", NO_SSH)):
            (folder / name).write_text(content)
            (folder / name).chmod(0o755)
        (standing.shared / "show.py").write_text(script)
        yield standing
