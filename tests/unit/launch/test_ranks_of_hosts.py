"""How many ranks each host takes within -n and --npernode, and the hosts that --exclude leaves out."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mpiddp.errors import UserError
from mpiddp.hosts.hostfile import Host, Hosts, parse_hostfile
from mpiddp.launch.place import ranks_per_host
from mpiddp.launch.plan import exclude


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


@pytest.mark.parametrize(
    ("n", "npernode", "message"),
    [
        (8, None, "-n 8 is more than the 6 slots of hosts.txt (node1=4, node2=2)."),
        (None, 3, "--npernode 3 is more than the 2 slots of node2 (hosts.txt:2)."),
        (5, 2, "-n 5 is more than --npernode 2 allows on the 2 hosts of hosts.txt: 4 ranks."),
    ],
)
def test_more_ranks_than_slots(n: int | None, npernode: int | None, message: str) -> None:
    hosts = parse("node1 slots=4\nnode2 slots=2\n")
    assert refusal(lambda: ranks_per_host(hosts, n, npernode)) == message


def test_a_long_list_of_hosts_is_cut_in_the_error() -> None:
    hosts = parse("".join(f"n{i} slots=1\n" for i in range(20)))
    assert refusal(lambda: ranks_per_host(hosts, 21, None)).endswith("n6=1, n7=1, and 12 more).")


def test_ranks_per_host_needs_every_slot_count() -> None:
    message = "hosts.txt:2: node2 has no slot count. Write: node2 slots=N"
    assert refusal(lambda: ranks_per_host(parse("node1 slots=1\nnode2\n"), None, None)) == message


def test_exclude() -> None:
    hosts = parse("node1 slots=4\nnode2 slots=2\nnode3 slots=0\n")
    assert [host.name for host in exclude(hosts, "NODE2, node3").hosts] == ["node1"]
    assert refusal(lambda: exclude(hosts, "node1,node9")) == (
        '--exclude: "node9" is not in hosts.txt, which has node1, node2, node3.'
    )
    assert refusal(lambda: exclude(hosts, "node1,node2")) == (
        "--exclude node1,node2 leaves no slots in hosts.txt."
    )
