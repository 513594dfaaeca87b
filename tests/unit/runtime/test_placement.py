"""The placement of the ranks is compared with the hostfile.

Tests mpiddp/runtime/rendezvous/placement.py.
python -m pytest tests/unit/runtime/test_placement.py
"""

from __future__ import annotations

import re

import pytest

from mpiddp.hosts.interfaces import Interface
from mpiddp.runtime.rendezvous.placement import RankPlacement, expected_hosts, misplaced, table
from mpiddp.runtime.rendezvous.result import RankInfo
from tests.support.errors import error


def placements(*hostnames: str) -> list[RankPlacement]:
    """One rank on each host, in order. A host's address is 10.0.0.<its number>."""
    found = []
    for rank, name in enumerate(hostnames):
        local_rank = hostnames[:rank].count(name)
        interface = Interface("eth0", f"10.0.0.{name[-1]}", "10.0.0.0/24")
        info = RankInfo(rank, local_rank, hostnames.count(name), name, f"boot-{name}", (interface,))
        found.append(RankPlacement(info, f"cuda:{local_rank}"))
    return found


def test_the_expected_host_of_each_rank() -> None:
    assert expected_hosts("node1:2,node2:1") == ["node1", "node1", "node2"]
    assert expected_hosts("[fd00::1]:1,10.0.0.2:1") == ["fd00::1", "10.0.0.2"]


@pytest.mark.parametrize(
    "expected",
    [
        "node1:2,node2:1",
        "node1.example.org:2,node2.example.org:1",
        "10.0.0.1:2,10.0.0.2:1",
        "alias:2,node2:1",  # mpirun has reached the host by it
    ],
)
def test_ranks_on_the_expected_hosts(expected: str) -> None:
    assert misplaced(placements("node1", "node1", "node2"), expected) == ""


@pytest.mark.parametrize(
    "expected",
    [
        "node2:1,node1:2",  # another order
        "node1:1,node2:2",  # other counts
        "node1:2",  # fewer ranks
        "10.0.0.2:2,10.0.0.1:1",  # addresses of the other host
        "node1:1,alias:1,node2:1",  # one machine under two names
    ],
)
def test_ranks_on_other_hosts(expected: str) -> None:
    sentence, *_ = misplaced(placements("node1", "node1", "node2"), expected).splitlines()
    assert re.fullmatch(error("environment, mca-params.conf", f"({expected})"), sentence)


@pytest.mark.parametrize(
    ("visible", "gpus", "device"),
    [("", "01", "cuda:1"), ("2,3", "23", "cuda:1 (GPU 3)"), ("GPU-a, GPU-b", "ab", "(GPU GPU-b)")],
)
def test_each_rank_has_a_gpu_of_its_own(
    visible: str, gpus: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = [
        RankPlacement.of_this_process(placement.info, 2, "openmpi")
        for placement in placements("node1", "node1")
    ]
    assert [placement.gpu[-1] for placement in found] == list(gpus)
    assert misplaced(found, "node1:2") == ""
    assert table(found).splitlines()[2].endswith(device)
    assert RankPlacement.of_this_process(found[1].info, 1, "openmpi").device == "cpu"
    assert RankPlacement.of_this_process(found[1].info, 2, "slurm").gpu == ""


def test_two_ranks_on_one_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    infos = [placement.info for placement in placements("node1", "node1", "node2")]
    found = []
    for info, visible in zip(infos, ("0,1", "1,0", "0,1"), strict=True):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        found.append(RankPlacement.of_this_process(info, 2, "openmpi"))
    sentence, *rows = misplaced(found, "node1:2,node2:1").splitlines()
    values = ("ranks 0 and 1 ", " GPU 0 of node1", "CUDA_VISIBLE_DEVICES")
    assert re.fullmatch(error("they see", *values), sentence)
    assert rows == table(found).splitlines()


def test_the_table_of_placements() -> None:
    assert table(placements("node1", "node2"), ["node2", "node1"]).splitlines() == [
        "rank  host   local rank  device  expected host",
        "0     node1  0           cuda:0  node2",
        "1     node2  0           cuda:0  node1",
    ]
