"""examples/ddp_with_checkpoints.py on hosts that share nothing.

Tests mpiddp/checkpoints/script.py under launchers.
python -m pytest tests/cluster/train/test_own_script_on_hosts.py
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import cluster
from tests.support.cluster import Cluster, Host
from tests.support.own_script import DIES, example, launch, model, steps_kept
from tests.support.ranks import LAUNCH, ROOT
from tests.support.training import unequal


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run of two ranks."""
    job = example(tmp_path_factory.mktemp("whole"))
    done = launch(job, "-H", "localhost:2")
    assert done.returncode == 0, done.stderr
    assert steps_kept(job.parent / "runs/ddp") == [35, 40]
    return job.parent


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with cluster.up_or_skip(3) as standing:
        yield standing


PRIVATE = "/run/run-of-a-test"  # each host has its own


def kept(host: Host) -> list[int]:
    return steps_kept(host.path(PRIVATE))


def launched(
    hosts: Cluster, job: Path, names: str, *options: str
) -> subprocess.CompletedProcess[str]:
    """`mpiddp launch` from the first of the named hosts."""
    return hosts[names.partition(":")[0]].run(
        [*LAUNCH, "-H", names, *options, str(job)],
        cwd=job.parent,
        env={"OMP_NUM_THREADS": "1", "PYTHONPATH": os.fspath(ROOT)},
    )


def test_hosts_that_share_nothing_each_keep_the_checkpoints(hosts: Cluster, whole: Path) -> None:
    """Rank 1's host dies once, and later rank 0's host is lost with its disk."""
    node0, node1, node2 = hosts.hosts
    folder = hosts.shared / "own-script"
    job = example(folder, each_step=DIES, run=PRIVATE)
    ran = launched(hosts, job, "node0:1,node1:1", "--max-restarts", "1")
    assert ran.returncode == 0, ran.stderr
    assert f"resuming from {PRIVATE}/checkpoints/step_00000015: step 15" in ran.stdout
    assert kept(node0) == kept(node1) == [35, 40]
    assert unequal(model(folder), model(whole)) == []

    for host in (node0, node1):
        shutil.rmtree(host.path(PRIVATE) / "checkpoints/step_00000040")
    shutil.rmtree(node0.path(PRIVATE))
    (folder / "model.pt").unlink()
    ran = launched(hosts, job, "node2:1,node1:1")
    assert ran.returncode == 0, ran.stderr
    assert f"{PRIVATE}/checkpoints/step_00000035 on node1: step 35" in ran.stdout
    assert kept(node2) == kept(node1) == [35, 40]
    assert unequal(model(folder), model(whole)) == []
