"""The placement of the ranks is compared with the hostfile.

Tests mpiddp/runtime/rendezvous/{result,meet}.py.
python -m pytest tests/unit/runtime/test_placement.py
"""

from __future__ import annotations

import json

import pytest

from mpiddp.errors import BAD_INPUT, UserError
from mpiddp.hosts.interfaces import Interface
from mpiddp.protocol.variables import PLACEMENT
from mpiddp.runtime.gpu import expected_hosts
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.job.ending import Refused
from mpiddp.runtime.rendezvous.meet import meet
from mpiddp.runtime.rendezvous.result import RankInfo, check_alike, table
from mpiddp.world import World
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


def test_the_table_of_placements() -> None:
    infos = placements("node1", "node2")
    infos[1] = infos[1]._replace(gpus="2,3")
    assert table(infos, ["node2", "node1"]).splitlines() == [
        "rank  host   local rank  visible GPUs  expected host",
        "0     node1  0           none          node2",
        "1     node2  0           2,3           node1",
    ]


def test_a_host_with_another_script_or_module_is_named() -> None:
    """Before torch is imported, and with the command that helps."""
    ours, theirs = (("helper.py", "aa" * 32), ("train.py", "bb" * 32)), ("helper.py", "cc" * 32)
    first, second = placements("node1", "node2")
    alike = [each._replace(program=ours) for each in (first, second)]
    check_alike(alike, {})
    for program, found in (((theirs, ours[1]), "cccccccc"), (ours[1:], "none")):
        other = [alike[0], second._replace(program=program)]
        values = ("helper.py ", " node2 ", f"sha256 {found} ", "aaaaaaaa on node1", "hosts push")
        with pytest.raises(UserError, match=error("differs on", *values)):
            check_alike(other, {})


def test_ranks_that_cannot_begin_are_named_once() -> None:
    first, second = placements("node1", "node2")
    problem = "train.py not found."
    for problems, printed in (
        ([problem] * 2, problem),
        (["", problem], f"rank 1 on node2: {problem}"),
    ):
        infos = [first._replace(problem=problems[0]), second._replace(problem=problems[1])]
        ranks = Coordinator(World(0, 2, 0, 1), None)
        ranks.has_launcher = True
        endings = [(each, BAD_INPUT * bool(each)) for each in problems]
        values = iter((infos, endings, [None, None]))
        ranks.exchange = lambda _, values=values: [json.dumps(each) for each in next(values)]
        with pytest.raises(Refused) as refused:
            meet(ranks, infos[0])
        assert (refused.value.code, refused.value.sentence) == (BAD_INPUT, printed)
