"""The placement of the ranks is compared with the hostfile.

Tests mpiddp/runtime/rendezvous/{result,meet}.py.
python -m pytest tests/unit/runtime/test_placement.py
"""

from __future__ import annotations

import pytest

from mpiddp.errors import UserError
from mpiddp.hosts.interfaces import Interface
from mpiddp.protocol.variables import PLACEMENT
from mpiddp.runtime.gpu import expected_hosts
from mpiddp.runtime.rendezvous.result import RankInfo, check_alike
from tests.support.errors import error


def placements(*hostnames: str) -> list[RankInfo]:
    """One rank on each host, in order. A host's address is 10.0.0.<its number>."""
    found = []
    for rank, name in enumerate(hostnames):
        local_rank = hostnames[:rank].count(name)
        interface = Interface("eth0", f"10.0.0.{name[-1]}", "10.0.0.0/24")
        size, boot = hostnames.count(name), f"boot-{name}"
        found.append(RankInfo(rank, local_rank, size, name, boot, (interface,)))
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
    check_alike(placements("node1", "node1", "node2"), {PLACEMENT: expected})


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
    with pytest.raises(UserError, match=error("environment, mca-params.conf", f"({expected})")):
        check_alike(placements("node1", "node1", "node2"), {PLACEMENT: expected})
