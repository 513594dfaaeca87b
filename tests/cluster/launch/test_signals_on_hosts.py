"""SIGTERM to every process of one host of a job.

Tests mpiddp/launch/supervise/{signals,mpirun}.py, mpiddp/launch/streams/output.py,
mpiddp/runtime/job/stop.py.
python -m pytest tests/cluster/launch/test_signals_on_hosts.py
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import cluster
from tests.support.cluster import Cluster
from tests.support.mpis import mpirun_of
from tests.support.patience import PATIENCE_S
from tests.support.ranks import LAUNCH, ROOT
from tests.support.signals import SLOW_SAVE
from tests.support.stopping import LONG_GRACE


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with cluster.up_or_skip(2) as standing:
        (standing.shared / "slow_save.py").write_text(SLOW_SAVE)
        yield standing


@pytest.mark.parametrize("mpi", ["openmpi5", "openmpi4", "mpich"])
def test_sigterm_to_every_process_of_one_host(hosts: Cluster, mpi: str) -> None:
    """Also to the ssh processes that mpirun has started there, while ranks run on another host."""
    command = [*LAUNCH, "--mpirun", mpirun_of(mpi), *LONG_GRACE, "-H", "node0:1,node1:1"]
    node0 = hosts["node0"]
    with node0.popen([*command, str(hosts.shared / "slow_save.py")], cwd=ROOT) as job:
        assert job.stdout is not None
        assert [job.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        pids = [each.pid for each in node0.processes() if is_of_job(each.command)]
        assert len(pids) >= 5  # launcher, mpirun, ssh, a rank and its workers
        node0.run(["kill", "-TERM", *map(str, pids)])
        stdout, stderr = job.communicate(timeout=PATIENCE_S)
    assert (job.returncode, stdout) == (75, "saved\nsaved\n"), stderr


def is_of_job(command: str) -> bool:
    names = ("slow_save", "mpirun", "prterun", "mpiexec", "hydra", "ssh node1", "orted", "prted")
    return any(name in command for name in names) or command.startswith("/usr/bin/ssh ")
