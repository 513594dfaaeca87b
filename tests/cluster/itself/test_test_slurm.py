"""The test cluster's Slurm starts tasks and batch scripts, and ends with its block.

Tests tests/support/cluster/slurm.py.
python -m pytest tests/cluster/itself/test_test_slurm.py
"""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.support import cluster
from tests.support.cluster import USER, needs, slurm
from tests.support.cluster.slurm import Slurm


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Slurm]:
    with cluster.up_or_skip(2) as hosts, slurm.up_or_skip(hosts) as standing:
        yield standing


@pytest.mark.parametrize("user", ["root", USER])
def test_srun_starts_tasks_on_all_hosts(two_hosts: Slurm, user: str) -> None:
    node1 = two_hosts.cluster["node1"]
    tasks = node1.run(["srun", "-N2", "--ntasks-per-node=2", "hostname"], user=user)
    assert Counter(tasks.stdout.split()) == {"node0": 2, "node1": 2}, tasks.stderr


def test_srun_sets_the_variables_of_ranks(two_hosts: Slurm) -> None:
    show = ["sh", "-c", "echo $SLURM_PROCID $SLURM_LOCALID $PMI_RANK $PMI_SIZE $(hostname)"]
    command = ["srun", "--mpi=pmi2", "-N2", "--ntasks-per-node=2", *show]
    tasks = two_hosts.cluster["node0"].run(command)
    assert sorted(tasks.stdout.splitlines()) == [
        "0 0 0 4 node0",
        "1 1 1 4 node0",
        "2 0 2 4 node1",
        "3 1 3 4 node1",
    ]


def test_sbatch_runs_a_script(two_hosts: Slurm) -> None:
    script = '#!/bin/sh\nhostname\necho "$SLURM_JOB_NUM_NODES $GREETING"\nsrun hostname\nexit 3\n'
    job = two_hosts.sbatch(script, "-N2", "--ntasks-per-node=1", env={"GREETING": "hello"})
    first, greeting, *tasks = job.stdout.splitlines()
    assert (first, greeting, sorted(tasks)) == ("node0", "2 hello", ["node0", "node1"])
    assert job.returncode == 3


def test_a_job_that_times_out_is_cancelled(two_hosts: Slurm) -> None:
    for timeout_s in (1.0, 4.0, 16.0, 64.0):  # until the time is enough for the job to begin
        with pytest.raises(TimeoutError) as late:
            two_hosts.sbatch("#!/bin/sh\necho begun\nexec sleep 600\n", timeout_s=timeout_s)
        if "it wrote: begun" in str(late.value):
            break
    else:
        pytest.fail(str(late.value))
    with pytest.raises(subprocess.CalledProcessError):
        two_hosts.sbatch("#!/bin/sh\n", "--nodes=3")  # more than the cluster has


def test_slurm_leaves_nothing_behind() -> None:
    if reason := needs.why_no_slurm():
        pytest.skip(reason)
    with cluster.up(1) as hosts:
        node0 = hosts["node0"]
        for _ in range(2):  # it can be started again
            with slurm.up(hosts, cpus=2):
                assert node0.run(["srun", "-n2", "hostname"]).stdout == "node0\nnode0\n"
            assert node0.processes() == []
