"""What ranks print on several hosts and under srun: each host has the files of its ranks.

Tests mpiddp/runtime/launcher/output.py, mpiddp/launch/streams/output.py under real starters.
python -m pytest tests/cluster/launch/test_output_on_hosts.py
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import cluster
from tests.support.cluster import Cluster
from tests.support.cluster.slurm import Slurm
from tests.support.errors import error
from tests.support.mpis import PACKAGES, mpirun_of
from tests.support.printing import PRINTS, TALKS, check
from tests.support.ranks import LAUNCH, ROOT

MPIS = ("openmpi5", *PACKAGES)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with cluster.up_or_skip(2) as standing:
        yield standing


def new_folder(hosts: Cluster, name: str) -> str:
    folder = hosts.shared / f"done-{name}"
    folder.mkdir()
    return str(folder)


@pytest.mark.parametrize("mpi", MPIS)
def test_over_hosts_each_host_has_the_files_of_its_ranks(hosts: Cluster, mpi: str) -> None:
    path = hosts.shared / "prints.py"
    path.write_text(PRINTS)
    logs = Path("/run/tmp") / f"logs-{mpi}"  # private to each host
    command = [*LAUNCH, "--mpirun", mpirun_of(mpi), "-H", "node1:2,node0:1"]
    command += ["--prefix", "auto", "--log-dir", str(logs), str(path), new_folder(hosts, mpi)]
    done = hosts["node0"].run(command, cwd=ROOT)
    assert done.returncode == 1, done.stderr
    check(done.stdout, done.stderr, ["node1", "node1", "node0"])
    names = {
        host.name: sorted(each.name for each in host.path(str(logs)).iterdir())
        for host in hosts.hosts
    }
    # The launcher runs on node0, and keeps there what mpirun itself prints: only Open MPI prints any.
    own = ["mpirun.log"] if mpi.startswith("openmpi") else []
    assert names["node0"] == [*own, "rank_00002.err", "rank_00002.out"]
    assert names["node1"] == [f"rank_0000{rank}.{end}" for rank in (0, 1) for end in ("err", "out")]
    assert [each.command for host in hosts.hosts for each in host.processes()] == []


def test_a_folder_that_one_host_cannot_write_ends_the_job(hosts: Cluster) -> None:
    path = hosts.shared / "talks.py"
    path.write_text(TALKS)
    hosts["node1"].path("/run/tmp/only_a_file").touch()
    command = [*LAUNCH, "-H", "node0:1,node1:1", "--log-dir", "/run/tmp/only_a_file", str(path)]
    done = hosts["node0"].run(command, cwd=ROOT)
    assert done.returncode == 2, done.stderr
    (sentence,) = [line for line in done.stderr.splitlines() if "only_a_file" in line]
    expected = error(":", "--log-dir /run/tmp/only_a_file: File exists")
    assert re.fullmatch(expected, sentence), sentence


def test_lines_are_whole_under_srun(batch: Slurm) -> None:
    path = batch.cluster.shared / "prints.py"
    path.write_text(PRINTS)
    job = [str(path), new_folder(batch.cluster, "srun")]
    command = [sys.executable, "-m", "mpiddp", "launch", "--prefix", "always", *job]
    text = f"#!/bin/sh\n{shlex.join(command)} 2> {batch.cluster.shared}/stderr\n"
    done = batch.sbatch(text, "-N2", "--ntasks-per-node=1", cwd=ROOT)
    check(done.stdout, (batch.cluster.shared / "stderr").read_text(), ["node0", "node1"])
