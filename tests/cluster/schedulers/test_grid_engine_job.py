"""Jobs of a real Grid Engine over two hosts without sshd: `qrsh -inherit` alone reaches the other host.

Tests mpiddp/hosts/transport.py, mpiddp/hosts/allocations.py, mpiddp/launch/starters/.
python -m pytest tests/cluster/schedulers/test_grid_engine_job.py
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import cluster
from tests.support.cluster import USER, Cluster, grid_engine, needs
from tests.support.cluster.grid_engine import GridEngine
from tests.support.cluster.ssh import stop_sshd
from tests.support.errors import error
from tests.support.mpis import mpirun_of
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT

MPIDDP = str(Path(sys.executable).with_name("mpiddp"))
SHOW = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
print("shown", *(os.environ[name] for name in names), int(total), flush=True)
dist.destroy_process_group()
"""
FAIL = """
import os, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if os.environ["RANK"] == "2":
    raise RuntimeError("a bug")
dist.barrier()
"""
# mpirun and its qrsh die at once, and nothing tells the ranks.
KILL_MPIRUN = """
import os, signal, time, mpiddp
mpiddp.init(backend="gloo")
if os.environ["RANK"] == "0":
    os.kill(os.getppid(), signal.SIGKILL)
time.sleep(10_000)
"""
WAIT = """
import os, pathlib, sys, time, mpiddp
mpiddp.init(backend="gloo")
pathlib.Path(sys.argv[1], "started." + os.environ["RANK"]).touch()
time.sleep(10_000)
"""
DAEMONS = ("sge_execd", "sge_qmaster", "sge_shepherd")
ENV = {"OMP_NUM_THREADS": "1"}
MPIS = ("openmpi5", "openmpi4", "mpich", "intelmpi")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    if reason := needs.why_no_grid_engine():
        pytest.skip(reason)
    with cluster.up(2) as standing:
        for name, text in (("show", SHOW), ("fail", FAIL), ("kill", KILL_MPIRUN), ("wait", WAIT)):
            (standing.shared / f"{name}.py").write_text(text)
        for host in standing.hosts:
            stop_sshd(host)
        yield standing


@pytest.fixture(scope="module")
def batch(hosts: Cluster) -> Iterator[GridEngine]:
    with grid_engine.up(hosts) as standing:
        yield standing


def launch(
    batch: GridEngine, *options: str, slots: str = "3", pe: str = "spread", user: str | None = None
) -> subprocess.CompletedProcess[str]:
    """`mpiddp launch` in a job script with this parallel environment."""
    script = f"#!/bin/sh\nexec {shlex.join([MPIDDP, 'launch', *options])}\n"
    return batch.qsub(script, "-pe", pe, slots, cwd=ROOT, env=ENV, user=user)


def shown(output: str) -> list[str]:
    return sorted(line for line in output.splitlines() if line.startswith("shown"))


def left(hosts: Cluster) -> list[str]:
    """The processes on the hosts that are not Grid Engine's."""
    found = [process.command for host in hosts.hosts for process in host.processes()]
    return [command for command in found if not any(daemon in command for daemon in DAEMONS)]


@pytest.mark.parametrize("mpi", MPIS)
def test_the_ranks_start_on_the_slots_of_the_job(batch: GridEngine, mpi: str) -> None:
    script = str(batch.cluster.shared / "show.py")
    done = launch(batch, "--mpirun", mpirun_of(mpi), script, slots="6", pe="fill")
    assert done.returncode == 0, done.stdout
    assert "no hosts given: using Grid Engine job" in done.stdout
    assert shown(done.stdout) == [
        *(f"shown {rank} {rank} 4 0 6" for rank in range(4)),
        *(f"shown {rank} {rank - 4} 2 1 6" for rank in range(4, 6)),
    ]


def test_a_job_of_another_user(batch: GridEngine) -> None:
    done = launch(batch, str(batch.cluster.shared / "show.py"), user=USER)
    assert done.returncode == 0, done.stdout
    assert len(shown(done.stdout)) == 3


def test_a_failing_rank_on_the_other_host(batch: GridEngine) -> None:
    done = launch(batch, str(batch.cluster.shared / "fail.py"))
    assert done.returncode == 1, done.stdout
    assert "RuntimeError: a bug" in done.stdout
    assert left(batch.cluster) == []


def test_a_killed_mpirun_leaves_no_rank_behind(batch: GridEngine) -> None:
    done = launch(batch, str(batch.cluster.shared / "kill.py"))
    assert done.returncode == 1, done.stdout
    assert "cannot be reached" not in done.stdout
    assert left(batch.cluster) == []


def test_qdel_ends_the_ranks_on_all_hosts(batch: GridEngine) -> None:
    login, shared = batch.cluster.hosts[0], batch.cluster.shared
    script = f"exec {MPIDDP} launch {shared}/wait.py {shared}\n"
    submit = ["qsub", "-terse", "-pe", "spread", "2", "-S", "/bin/sh", "-wd", str(ROOT)]
    submit += ["-j", "y", "-o", str(shared / "qdel.out")]
    job = login.run(submit, env=batch.env, stdin=script, check=True).stdout.strip()
    wait_until(lambda: len(list(shared.glob("started.*"))) == 2)
    login.run(["qdel", job], env=batch.env, check=True)
    wait_until(lambda: not left(batch.cluster))


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_parallel_environment_that_starts_nothing_on_other_hosts(batch: GridEngine) -> None:
    done = launch(batch, str(batch.cluster.shared / "show.py"), pe="loose")
    assert done.returncode == 2, done.stdout
    sentences = [line for line in done.stdout.splitlines() if "failed" in line]
    assert len(sentences) == 1, done.stdout
    values = ("qrsh -inherit node", ": --hostfile $PE_HOSTFILE")
    assert re.fullmatch(error("Where ssh", *values), sentences[0]), sentences


def test_the_hosts_of_a_pe_hostfile_over_ssh(batch: GridEngine) -> None:
    script = f"#!/bin/sh\nexec {MPIDDP} launch --hostfile $PE_HOSTFILE {ROOT}/setup.py\n"
    done = batch.qsub(script, "-pe", "spread", "2", cwd=ROOT, env=ENV)
    assert done.returncode == 2, done.stdout
    (sentence,) = done.stdout.splitlines()
    assert re.fullmatch(error("connection refused", "ssh node"), sentence), sentence
