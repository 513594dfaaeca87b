"""How many ranks each host takes within -n and --npernode, and the hosts that --exclude leaves out."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from mpiddp.errors import UserError
from mpiddp.hosts.hostfile import Host, Hosts, parse_hostfile
from mpiddp.launch.place import ranks_per_host
from mpiddp.launch.plan import exclude
from tests.support.errors import error


def parse(text: str) -> Hosts:
    return parse_hostfile(text.encode(), "hosts.txt")


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as raised:
        call()
    return str(raised.value)


def test_a_host_with_slots_0_gets_no_ranks() -> None:
    hosts = parse("node1 slots=0\nnode2 slots=2\n")
    assert ranks_per_host(hosts, None, None).hosts == (Host("node2", slots=2, ranks=2),)


def test_ranks_fill_the_slots_in_file_order() -> None:
    hosts = parse("c slots=1\na slots=3\nb slots=2\n")

    def ranks(n: int | None, npernode: int | None = None) -> dict[str, int]:
        return {host.name: host.ranks for host in ranks_per_host(hosts, n, npernode).hosts}

    assert ranks(None) == {"c": 1, "a": 3, "b": 2}
    assert ranks(2) == {"c": 1, "a": 1}
    assert ranks(None, 1) == {"c": 1, "a": 1, "b": 1}
    assert ranks(2, 1) == {"c": 1, "a": 1}


def test_exclude() -> None:
    hosts = parse("node1 slots=4\nnode2 slots=2\nnode3 slots=0\n")
    assert [host.name for host in exclude(hosts, "NODE2, node3").hosts] == ["node1"]
    values = ('--exclude: "node9"', "hosts.txt", "node1, node2, node3.")
    unknown = error("--exclude", *values)
    assert re.fullmatch(unknown, refusal(lambda: exclude(hosts, "node1,node9")))
    none_left = error("no slots", "--exclude node1,node2 ", "hosts.txt")
    assert re.fullmatch(none_left, refusal(lambda: exclude(hosts, "node1,node2")))
