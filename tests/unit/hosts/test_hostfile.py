"""The hostfile grammar, and the keys of `mpiddp hosts keys`."""

import pytest

from mpiddp.hosts.hostfile import Host, Hosts, parse_host_list, parse_hostfile


def parse(text):
    return parse_hostfile(text.encode(), "hosts.txt")


@pytest.mark.parametrize(
    ("line", "host"),
    [
        ("node1", Host("node1")),
        ("node1 slots = 4", Host("node1", slots=4)),
        ("\tnode1\tslots=4 ", Host("node1", slots=4)),
        ("node1 slots=4#fast", Host("node1", slots=4)),
        ("node1 # grün, ohne slots=", Host("node1")),
        ("node1 max-slots = 4", Host("node1", max_slots=4)),
        ("node1:2 user=joe", Host("node1", slots=2, user="joe")),
        ("joe.b_c-d@node1:3", Host("node1", slots=3, user="joe.b_c-d")),
        ("a_b-c.example.org", Host("a_b-c.example.org")),
        ("10.0.0.7:2", Host("10.0.0.7", slots=2)),
        ("fe80::1 slots=2", Host("fe80::1", slots=2)),
        ("joe@[::1]", Host("::1", user="joe")),
        ("_svc@node1", Host("node1", user="_svc")),
        ("FE80:0:0::1:2", Host("fe80::1:2")),
        ("node1 port=1", Host("node1", port=1)),
        ("node1 port=65535", Host("node1", port=65535)),
        ("node1 slots=2 max_slots=2", Host("node1", slots=2, max_slots=2)),
    ],
)
def test_parse_a_valid_line(line, host):
    assert parse(line).hosts == (host,)


def test_parse_a_host_list():
    hosts = parse_host_list("h1:2, joe@h2:4,[::1]:1,h3")
    assert hosts == Hosts(
        "-H", (Host("h1", 2), Host("h2", 4, user="joe"), Host("::1", 1), Host("h3"))
    )
    assert hosts.hosts[1].ssh_target == "joe@h2"


@pytest.mark.parametrize(
    "data",
    [b"\xef\xbb\xbfnode1 slots=2\n", b"# a\r\nnode1 slots = 2 \r\n", b"\r\nnode1\r\nnode1\r"],
)
def test_windows_line_ends_and_a_byte_order_mark_do_no_harm(data):
    assert parse_hostfile(data, "hosts.txt").hosts == (Host("node1", 2),)


def test_gpus_of_a_host():
    """Without slots=, the host has a slot for each."""
    hosts = parse("node1 gpus=0,2,3\nnode2 slots=1 gpus = 1\n")
    assert [(host.slots, host.gpus) for host in hosts.hosts] == [(3, (0, 2, 3)), (1, (1,))]
    (host,) = parse("node1 gpus=MIG-4a/7/0,MIG-5b\n").hosts
    assert (host.slots, host.gpus) == (2, ("MIG-4a/7/0", "MIG-5b"))
