"""Local ranks are counted in the order of the ranks, unless a launcher sets them.

Tests mpiddp/world.py, mpiddp/runtime/join.py, mpiddp/runtime/rendezvous/store.py.
python -m pytest tests/unit/runtime/test_counted_local_ranks.py
"""

from __future__ import annotations

from mpiddp.hosts.interfaces import Interface
from mpiddp.runtime.rendezvous.result import RankInfo, with_local_ranks


def test_local_ranks_are_counted_in_the_order_of_the_ranks() -> None:
    eth0 = (Interface("eth0", "10.0.0.1", "10.0.0.0/24"),)
    hosts = ["a", "b", "a", "a"]
    infos = [RankInfo(rank, None, None, host, host, eth0) for rank, host in enumerate(hosts)]
    counted = [(info.local_rank, info.local_world_size) for info in with_local_ranks(infos)]
    assert counted == [(0, 3), (0, 1), (1, 3), (2, 3)]


def test_local_ranks_that_a_launcher_sets_are_kept() -> None:
    eth0 = (Interface("eth0", "10.0.0.1", "10.0.0.0/24"),)
    infos = [RankInfo(rank, 1 - rank, None, "a", "a", eth0) for rank in range(2)]
    counted = [(info.local_rank, info.local_world_size) for info in with_local_ranks(infos)]
    assert counted == [(1, 2), (0, 2)]
