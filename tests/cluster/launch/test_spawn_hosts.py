"""`mpiddp.spawn` over hosts that do not share the script: it travels, and Ctrl-C leaves no process.

Tests mpiddp/spawning/.
python -m pytest tests/cluster/launch/test_spawn_hosts.py
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator

import pytest

from tests.cluster.launch.test_launch_hosts import processes_left
from tests.support import cluster
from tests.support.cluster import Cluster
from tests.support.mpis import mpirun_of
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT

HELPERS = """
from dataclasses import dataclass

@dataclass
class Found:
    host: str
    tenfold: int

def found(host, rank):
    return Found(host, 10 * rank)
"""
# node1 has neither of these two files.
CALLER = """
import socket, sys
import helpers
import mpiddp
import torch
import torch.distributed as dist

def work(factor):
    with mpiddp.process_group(backend="gloo") as world:
        total = torch.tensor([world.rank + 1])
        dist.all_reduce(total)
    print("hello")
    return helpers.found(socket.gethostname(), factor * world.rank), total

for found, total in mpiddp.spawn(work, 2, hosts=["node1:2", "node0:1"], mpirun=sys.argv[1], log_ranks="all"):
    print(isinstance(found, helpers.Found), found.host, found.tenfold, total.item())
"""
FAILS = """
import mpiddp, socket

def work():
    if socket.gethostname() == "node1":
        raise LookupError("no such thing")
    mpiddp.init(backend="gloo")

try:
    mpiddp.spawn(work, hosts="node0:1,node1:1")
except mpiddp.RankFailed as error:
    print(error.rank, error.hostname, repr(error.__cause__))
    print(error.traceback)
"""
SLEEPS = """
import mpiddp, time

def work():
    print("ready")
    time.sleep(1000)

mpiddp.spawn(work, hosts="node0:1,node1:1", log_ranks="all", prefix="never")
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with cluster.up_or_skip(2) as standing:
        yield standing


def command(hosts: Cluster, text: str, *args: str) -> list[str]:
    """The command of a script in the home folder of node0, which is its own."""
    folder = hosts["node0"].path(hosts["node0"].home())
    (folder / "helpers.py").write_text(HELPERS)
    (folder / "job.py").write_text(text)
    assert not hosts["node1"].path(f"{hosts['node0'].home()}/job.py").exists()
    return [sys.executable, "job.py", *args]


ENV = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("mpi", ["openmpi5", "mpich"])
def test_function_and_modules_reach_hosts_without_the_files(hosts: Cluster, mpi: str) -> None:
    env = {**ENV, "MPIDDP_PREFIX": "auto"}
    done = hosts["node0"].run(command(hosts, CALLER, mpirun_of(mpi)), env=env)
    lines = done.stdout.splitlines()
    assert sorted(lines[:3]) == [
        "[rank 0 node1] hello",
        "[rank 1 node1] hello",
        "[rank 2 node0] hello",
    ], done.stderr
    assert lines[3:] == ["True node1 0 6", "True node1 20 6", "True node0 40 6"]
    assert processes_left(hosts) == []


def test_the_exception_of_another_host(hosts: Cluster) -> None:
    done = hosts["node0"].run(command(hosts, FAILS), env=ENV)
    first, *rest = done.stdout.splitlines()
    assert first == "1 node1 LookupError('no such thing')", done.stderr
    # node1 does not have the file whose lines these are.
    assert '        raise LookupError("no such thing")'.strip() in [line.strip() for line in rest]
    assert processes_left(hosts) == []


def test_ctrl_c_leaves_no_process_on_any_host(hosts: Cluster) -> None:
    with hosts["node0"].popen(command(hosts, SLEEPS), env=ENV) as caller:
        assert caller.stdout is not None
        assert [caller.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        caller.send_signal(signal.SIGINT)
        stderr = caller.communicate(timeout=PATIENCE_S)[1]
    assert stderr.endswith("KeyboardInterrupt\n"), stderr
    assert processes_left(hosts) == []
