"""The master address, chosen from RankInfos made by hand. tests/unit/hosts/test_sockets.py has real sockets.

Tests mpiddp/runtime/rendezvous/{result,meet}.py.
"""

import re

import pytest

from mpiddp.errors import UserError
from mpiddp.hosts.interfaces import Interface
from mpiddp.runtime.rendezvous.result import RankInfo, check_alike, choose, joined
from mpiddp.world import World
from tests.support.errors import error

LO = Interface("lo", "127.0.0.1", "127.0.0.0/8")
LO_DEBIAN = Interface("lo", "127.0.1.1", "127.0.0.0/8")
DOCKER0 = Interface("docker0", "172.17.0.1", "172.17.0.0/16")
DOCKER0_RENAMED = Interface("bridge0", "172.17.0.1", "172.17.0.0/16")
OWN = Interface("eth9", "192.168.7.1", "192.168.7.0/24")
Host = tuple[Interface, ...]


def eth(host: int, name: str = "eth0", network: str = "10.0.0") -> Interface:
    return Interface(name, f"{network}.{host + 1}", f"{network}.0/24")


def six(host: int) -> Interface:
    return Interface("eth0", f"fd00::{host + 1}", "fd00::/64")


def ranks_on(*hosts: Host, ranks: int = 1) -> list[RankInfo]:
    """The RankInfos of `ranks` ranks on each host; a host is given by its interfaces."""
    return [
        RankInfo(node * ranks + local, local, ranks, f"node{node}", f"boot-{node}", own)
        for node, own in enumerate(hosts)
        for local in range(ranks)
    ]


TWO = ((LO, eth(0)), (LO, eth(1)))
TWO_NETWORKS = tuple((LO, eth(node), eth(node, "eth1", "10.9.0")) for node in range(2))
OTHER_NAMES = ((LO, eth(0, "eth0")), (LO, eth(1, "ens5")))


@pytest.mark.parametrize(
    ("hosts", "env", "expected"),
    [
        ([(LO, eth(0), DOCKER0)], {}, ["127.0.0.1"]),
        (TWO, {}, ["10.0.0.1"]),
        (TWO, {"MASTER_ADDR": "", "MPIDDP_INTERFACE": ""}, ["10.0.0.1"]),
        ([(LO_DEBIAN, eth(0)), (LO_DEBIAN, eth(1))], {}, ["10.0.0.1"]),
        # A bridge has the same address on every host.
        ([(LO, DOCKER0, eth(0)), (LO, DOCKER0, eth(1))], {}, ["10.0.0.1"]),
        ([(LO, DOCKER0_RENAMED, eth(0)), (LO, DOCKER0_RENAMED, eth(1))], {}, ["10.0.0.1"]),
        # A network that all hosts share comes first.
        ([(LO, OWN, eth(0)), (LO, eth(1)), (LO, eth(2))], {}, ["10.0.0.1", "192.168.7.1"]),
        (TWO_NETWORKS, {}, ["10.0.0.1", "10.9.0.1"]),
        ([(LO, six(0)), (LO, six(1))], {}, ["fd00::1"]),
        ([(LO, six(0), eth(0)), (LO, six(1), eth(1))], {}, ["10.0.0.1", "fd00::1"]),
        (TWO_NETWORKS, {"MPIDDP_INTERFACE": "eth1"}, ["10.9.0.1"]),
        (TWO_NETWORKS, {"MPIDDP_INTERFACE": "10.9.0.77/24"}, ["10.9.0.1"]),
        (TWO_NETWORKS, {"MPIDDP_NETWORKS": "10.9.0.0/16"}, ["10.9.0.1"]),
        (OTHER_NAMES, {"MPIDDP_INTERFACE": "10.0.0.0/24"}, ["10.0.0.1"]),
        (TWO, {"MASTER_ADDR": "192.0.2.7"}, ["192.0.2.7"]),
        (TWO[:1], {"MASTER_ADDR": "127.0.0.5"}, ["127.0.0.5"]),
        (TWO, {"MASTER_ADDR": "localhost"}, ["10.0.0.1"]),
    ],
)
def test_addresses_on_which_rank_0_can_listen(hosts, env, expected):
    assert choose(ranks_on(*hosts, ranks=2), env) == expected


@pytest.mark.parametrize(
    ("hosts", "requested", "sentence"),
    [
        (OTHER_NAMES, "ib0", error("interface", '"ib0"', " node0,", " lo and eth0.")),
        (OTHER_NAMES, "eth0", error("interface", '"eth0"', " node1,", " lo and ens5.")),
        (OTHER_NAMES, "lo", error("one: --master-addr", "node0,", ": --master-addr ADDR ")),
        (
            ((LO, DOCKER0), (LO, DOCKER0, eth(1))),
            "",
            error("one: --master-addr", "node0,", " lo 127.0.0.1, docker0 172.17.0.1."),
        ),
    ],
)
def test_no_address_that_other_hosts_can_reach(hosts, requested, sentence):
    infos, env = ranks_on(*hosts), {"MPIDDP_INTERFACE": requested}

    def chosen() -> list[str]:
        check_alike(infos, [()] * len(infos), env)
        return choose(infos, env)

    with pytest.raises(UserError) as refused:
        chosen()
    assert re.fullmatch(sentence, str(refused.value))


@pytest.mark.parametrize(
    ("address", "requested", "expected"),
    [
        ("10.0.0.7", "", "eth0"),
        ("10.0.0.7", "eth0,eth1", "eth0"),
        ("10.0.0.7", "eth1", "eth1"),
        ("10.0.0.7", "ib0", "eth0"),
        ("127.0.0.1", "eth1", "lo"),
    ],
)
def test_the_interface_of_a_rank(address, requested, expected):
    info = RankInfo(0, 0, 1, "a", "a", TWO_NETWORKS[0])
    assert info.interface_for(address, requested) == expected


def test_hosts_are_numbered_in_the_order_of_their_lowest_rank():
    """Two machines may have one name."""
    machines = ["b", "a", "b", "a"]
    infos = [RankInfo(rank, rank // 2, 2, "x", machines[rank], ()) for rank in range(4)]
    worlds = [joined(World(rank, 4, None, None), infos, "10.0.0.2", 1) for rank in range(4)]
    assert [(world.node_rank, world.num_nodes) for world in worlds] == [(0, 2), (1, 2)] * 2
