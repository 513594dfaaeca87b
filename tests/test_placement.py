"""Where the ranks are is held against where the hostfile wants them."""

from __future__ import annotations

import pytest

from mpiddp.address import Card
from mpiddp.network import Interface
from mpiddp.placement import Place, expected_hosts, misplaced, table
from tests.ranks import mpirun, own_lines

EXAMPLE = "examples/message_passing.py"


def places(*hostnames: str) -> list[Place]:
    """A rank on each, in order; the hosts have the addresses 10.0.0.<its number>."""
    found = []
    for rank, name in enumerate(hostnames):
        local_rank = hostnames[:rank].count(name)
        interface = Interface("eth0", f"10.0.0.{name[-1]}", "10.0.0.0/24")
        card = Card(rank, local_rank, hostnames.count(name), name, f"boot-{name}", (interface,))
        found.append(Place(card, f"cuda:{local_rank}"))
    return found


def test_the_launchers_wish_host_by_host() -> None:
    assert expected_hosts("node1:2,node2:1") == ["node1", "node1", "node2"]
    assert expected_hosts("[fd00::1]:1,10.0.0.2:1") == ["fd00::1", "10.0.0.2"]


@pytest.mark.parametrize(
    "wish",
    ["node1:2,node2:1", "node1.example.org:2,node2.example.org:1", "10.0.0.1:2,10.0.0.2:1"],
)
def test_ranks_in_their_places(wish: str) -> None:
    assert misplaced(places("node1", "node1", "node2"), wish) == ""


@pytest.mark.parametrize(
    "wish",
    [
        "node2:1,node1:2",  # another order
        "node1:1,node2:2",  # other counts
        "node1:2",  # fewer ranks
        "10.0.0.2:2,10.0.0.1:1",  # addresses of the other host
        "node1:1,alias:1,node2:1",  # one machine under two names
    ],
)
def test_ranks_elsewhere(wish: str) -> None:
    assert f"not where the hostfile wants them ({wish})" in misplaced(
        places("node1", "node1", "node2"), wish
    )


def test_the_table() -> None:
    assert table(places("node1", "node2"), ["node2", "node1"]).splitlines() == [
        "rank  host   local rank  device  wanted host",
        "0     node1  0           cuda:0  node2",
        "1     node2  0           cuda:0  node1",
    ]


def test_real_ranks_in_wrong_places_end_with_the_table_once() -> None:
    done = mpirun(2, EXAMPLE, env={"MPIDDP_PLACEMENT": "nodeA:1,nodeB:1"})
    assert (done.returncode, done.stdout) == (2, "")
    sentence, head, *rows = own_lines(done.stderr)
    assert sentence.startswith("the ranks are not where the hostfile wants them (nodeA:1,nodeB:1).")
    assert head.split() == ["rank", "host", "local", "rank", "device", "wanted", "host"]
    assert [row.split()[0] + row.split()[-1] for row in rows] == ["0nodeA", "1nodeB"]
