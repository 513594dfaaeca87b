"""A command on several hosts: it is looked for before the start, stops by itself, and leaves no process.

Tests mpiddp/runtime/start/guardian.py, mpiddp/launch/preflight.py.
python -m pytest tests/cluster/launch/test_command_on_hosts.py
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator

import pytest

from tests.support import cluster
from tests.support.cluster import Cluster
from tests.support.errors import error
from tests.support.mpis import PACKAGES, mpirun_of
from tests.support.patience import PATIENCE_S
from tests.support.ranks import LAUNCH, ROOT
from tests.support.stopping import LONG_GRACE

MPIS = ("openmpi5", *PACKAGES)
HOSTS = ("-H", "node0:1,node1:1")
STUBBORN = "echo ready; trap '' TERM; setsid sleep 1011 & sleep 1012; sleep 1013"


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with cluster.up_or_skip(2) as standing:
        yield standing


def commands(hosts: Cluster) -> list[str]:
    return [process.command for host in hosts.hosts for process in host.processes()]


def wait_until_empty(hosts: Cluster) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while left := commands(hosts):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("victim", ["the rank", "the launcher"])
def test_sigkill_leaves_no_process(hosts: Cluster, mpi: str, victim: str) -> None:
    command = [*LAUNCH, "--mpirun", mpirun_of(mpi), *HOSTS, "--", "bash", "-c", STUBBORN]
    with hosts["node0"].popen(command, cwd=ROOT) as job:
        assert job.stdout is not None
        assert [job.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        if victim == "the rank":
            ranks = [p for p in hosts["node1"].processes() if "-m mpiddp run" in p.command]
            hosts["node1"].run(["kill", "-KILL", str(min(p.pid for p in ranks))], check=True)
        else:
            launcher = next(p for p in hosts["node0"].processes() if "mpiddp launch" in p.command)
            hosts["node0"].run(["kill", "-KILL", str(launcher.pid)], check=True)
        stderr = job.communicate(timeout=PATIENCE_S)[1]
    if victim == "the rank":
        assert job.returncode == 1, stderr
        assert "mpiddp: rank 1 on node1 " in stderr
    wait_until_empty(hosts)


@pytest.mark.parametrize("mpi", MPIS)
def test_a_stop_waits_for_the_command_that_saves(hosts: Cluster, mpi: str) -> None:
    text = (
        'if [ $RANK = 1 ]; then trap "sleep 4; echo saved; exit 75" TERM; fi; '
        "echo ready; while :; do sleep 0.1; done"
    )
    command = [*LAUNCH, "--mpirun", mpirun_of(mpi), *LONG_GRACE, *HOSTS, "--", "bash", "-c", text]
    with hosts["node0"].popen(command, cwd=ROOT) as job:
        assert job.stdout is not None
        assert [job.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        job.send_signal(signal.SIGINT)
        stdout, stderr = job.communicate(timeout=PATIENCE_S)
    assert (job.returncode, stdout) == (75, "saved\n"), stderr
    wait_until_empty(hosts)


@pytest.mark.parametrize(
    ("program", "lacks"),
    [("only_here", "PATH"), ("bin/only_here", "executable")],
)
def test_a_program_that_is_missing_on_one_host(hosts: Cluster, program: str, lacks: str) -> None:
    """The folder is on every host, and the program on the first alone."""
    for host in hosts.hosts:
        host.run(["mkdir", "-p", "/run/job/bin"], check=True)
    hosts["node0"].run(["cp", "/bin/true", "/run/job/bin/only_here"], check=True)
    path = "/run/job/bin:/usr/local/bin:/usr/bin:/bin"
    env = {"PATH": path, "PYTHONPATH": str(ROOT)}
    done = hosts["node0"].run([*LAUNCH, *HOSTS, "--", program], cwd="/run/job", env=env)
    assert (done.returncode, done.stdout) == (2, "")
    sentence = error("Install it on", f"node1: {program} ", lacks)
    assert re.fullmatch(f"{sentence}\n", done.stderr), done.stderr
