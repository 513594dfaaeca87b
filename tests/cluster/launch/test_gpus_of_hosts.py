"""The GPUs of each host in a job over several hosts.

Tests mpiddp/hosts/gpus.py, mpiddp/launch/variables.py, mpiddp/runtime/start/own_gpu.py.
python -m pytest tests/cluster/launch/test_gpus_of_hosts.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.support import cluster
from tests.support.cluster import Cluster
from tests.support.errors import error
from tests.support.gpu_tools import NVIDIA, PRINT_GPUS, tool
from tests.support.ranks import LAUNCH, ROOT


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with cluster.up_or_skip(3) as standing:
        (standing.shared / "gpus.py").write_text(PRINT_GPUS)
        yield standing


def test_each_hosts_ranks_see_their_own_gpus(hosts: Cluster) -> None:
    """node0 has the launcher's value, node1 the hostfile's numbers, node2 none: it sees all of its GPUs."""
    hostfile = hosts.shared / "hosts"
    hostfile.write_text("node0 slots=1\nnode1 gpus=1,0\nnode2 slots=1\n")
    path = tool(hosts.shared / "tools", "nvidia-smi", NVIDIA)
    env = {"PATH": path, "CUDA_VISIBLE_DEVICES": "1", "PYTHONPATH": str(ROOT)}
    command = [*LAUNCH, "--hostfile", str(hostfile), str(hosts.shared / "gpus.py")]
    done = hosts["node0"].run(command, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "0 node0 1",
        "1 node1 1,0",
        "2 node1 1,0",
        "3 node2 None",
    ]
    hostfile.write_text("node0 slots=1\nnode2 slots=1\n")
    done = hosts["node0"].run(
        [*command[:-1], "-x", "CUDA_VISIBLE_DEVICES", command[-1]], cwd=ROOT, env=env
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 node0 1", "1 node2 1"]


def test_a_gpu_that_a_host_lacks_starts_nothing(hosts: Cluster) -> None:
    hostfile = hosts.shared / "hosts"
    hostfile.write_text("node0 slots=1\nnode1 gpus=0,2\n")
    path = tool(hosts.shared / "tools", "nvidia-smi", NVIDIA)
    command = [*LAUNCH, "--hostfile", str(hostfile), str(hosts.shared / "gpus.py")]
    done = hosts["node0"].run(command, cwd=ROOT, env={"PATH": path, "PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stdout) == (2, "")
    sentence = error("They are", "node1 has 2 GPUs", "GPU 2 (gpus=0,2)")
    assert re.fullmatch(f"{sentence}\n", done.stderr), done.stderr
