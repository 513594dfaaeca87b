"""examples/series on two hosts that share no folder.

python -m pytest tests/cluster/train/test_series_on_hosts.py
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpiddp.checkpoints import folder as directory
from tests.support import cluster
from tests.support.cluster import Cluster
from tests.support.ranks import LAUNCH, ROOT
from tests.support.series import SERIES, losses, run

EPOCHS = 4


SIZES = ("--samples", "256", "--batch-size", "32")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with cluster.up_or_skip(2) as standing:
        yield standing


def test_two_hosts_that_share_no_folder_compute_the_losses_of_one(
    tmp_path: Path, hosts: Cluster
) -> None:
    """The second run resumes on both hosts, one of which has lost its snapshots."""
    one_host = run("mpiddp launch", "many_hosts.py", EPOCHS, "1", *SIZES, folder=tmp_path)
    assert one_host.returncode == 0, one_host.stderr
    out = Path("/run/series-of-a-test")  # each host has its own
    start_on_two = [*LAUNCH, "-H", "node0:1,node1:1", SERIES / "many_hosts.py"]
    found = {}
    for epochs in (2, EPOCHS):
        done = hosts["node0"].run(
            [*start_on_two, str(epochs), "1", *SIZES, "--out", out],
            cwd=ROOT,
            env={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )
        assert done.returncode == 0, done.stderr
        found |= losses(done.stdout)
        for host in hosts.hosts:
            directory.verify(host.path(out) / f"checkpoints/step_{epochs:08d}")
        if epochs == 2:
            assert list(found) == [1, 2]
            shutil.rmtree(hosts["node1"].path(out))
    assert f"resuming from {out}/checkpoints/step_00000002: step 2\n" in done.stdout
    assert found == losses(one_host.stdout)  # the same sums in the same order
