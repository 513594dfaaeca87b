"""The master address: chosen from RankInfos made by hand, bound and probed on real loopback sockets.

Tests mpiddp/runtime/rendezvous/result.py.
python -m pytest tests/unit/runtime/test_master_address.py
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping

import pytest

from mpiddp.errors import JobFailed, UserError
from mpiddp.hosts import sockets
from mpiddp.hosts.interfaces import Interface, interfaces
from mpiddp.hosts.sockets import bind, port_in, reachable, resolve
from mpiddp.runtime.rendezvous.result import RankInfo, choose, gathered, unreachable, world_with
from mpiddp.world import World
from tests.support.errors import error
from tests.support.few_files import files_left
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT

HERE = socket.gethostname()
LO = Interface("lo", "127.0.0.1", "127.0.0.0/8")
LO_DEBIAN = Interface("lo", "127.0.1.1", "127.0.0.0/8")
DOCKER0 = Interface("docker0", "172.17.0.1", "172.17.0.0/16")
DOCKER0_RENAMED = Interface("bridge0", "172.17.0.1", "172.17.0.0/16")


def eth(host: int, name: str = "eth0", network: str = "10.0.0") -> Interface:
    return Interface(name, f"{network}.{host + 1}", f"{network}.0/24")


def ranks_on(*hosts: tuple[Interface, ...], ranks: int = 1) -> list[RankInfo]:
    """The RankInfos of `ranks` ranks on each host; a host is given by its interfaces."""
    return [
        RankInfo(node * ranks + local, local, ranks, f"node{node}", f"boot-{node}", own)
        for node, own in enumerate(hosts)
        for local in range(ranks)
    ]


def addresses(infos: list[RankInfo], env: Mapping[str, str] | None = None) -> tuple[str, ...]:
    return tuple(address for address, _ in choose(infos, env or {}))


def reasons(infos: list[RankInfo], env: Mapping[str, str] | None = None) -> list[str]:
    return [reason for _, reason in choose(infos, env or {})]


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    return str(caught.value)


# --- hosts and ranks ---


def test_hosts_are_numbered_in_the_order_of_their_lowest_rank() -> None:
    a, b = ranks_on((LO, eth(0)), (LO, eth(1)), ranks=2)[::2]
    by_node = [b, a]  # rank 0 on node1, rank 1 on node0, and so on in turn
    infos = [
        RankInfo(rank, rank // 2, 2, by_node[rank % 2].hostname, "m", by_node[rank % 2].interfaces)
        for rank in range(4)
    ]
    worlds = [world_with(World(rank, 4, None, None), infos, "10.0.0.2", 1) for rank in range(4)]
    assert [(world.node_rank, world.num_nodes) for world in worlds] == [(0, 2), (1, 2)] * 2
    assert addresses(infos) == (eth(1).address,)


def test_two_machines_of_one_name_are_two_hosts() -> None:
    infos = [
        RankInfo(rank, 0, 1, "localhost", f"boot-{rank}", (LO, eth(rank))) for rank in range(2)
    ]
    assert addresses(infos) == (eth(0).address,)


@pytest.mark.parametrize(
    ("set_by_launcher", "expected"),
    [
        ([None] * 4, [(0, 3), (0, 1), (1, 3), (2, 3)]),
        ([2, 0, 1, 0], [(2, 3), (0, 1), (1, 3), (0, 3)]),
    ],
)
def test_local_ranks_that_no_launcher_sets_are_counted_on_each_host(
    set_by_launcher: list[int | None], expected: list[tuple[int, int]]
) -> None:
    infos = [
        RankInfo(rank, set_by_launcher[rank], None, host, host, [eth(0)])
        for rank, host in enumerate("abaa")
    ]
    found = gathered(info.as_json() for info in infos)
    assert [(info.local_rank, info.local_world_size) for info in found] == expected


def test_one_machine_under_two_names_is_refused() -> None:
    infos = [RankInfo(rank, 0, 1, "node0", "boot-0", (LO, eth(0))) for rank in range(2)]
    sentence = error("expected 0", "node0 ", "2 ranks", " 0, 0;", " 0 to 0.")
    assert re.fullmatch(sentence, refusal(lambda: choose(infos, {})))


# --- the address ---


def test_a_job_on_one_host_uses_the_loopback() -> None:
    assert addresses(ranks_on((LO, eth(0), DOCKER0), ranks=4)) == ("127.0.0.1",)


def test_a_job_on_two_hosts_uses_no_loopback() -> None:
    assert addresses(ranks_on((LO, eth(0)), (LO, eth(1)))) == ("10.0.0.1",)
    assert addresses(ranks_on((LO_DEBIAN, eth(0)), (LO_DEBIAN, eth(1)))) == ("10.0.0.1",)


@pytest.mark.parametrize("decoy", [DOCKER0, DOCKER0_RENAMED])
def test_a_bridge_with_the_same_address_on_every_host_is_skipped(decoy: Interface) -> None:
    infos = ranks_on((LO, decoy, eth(0)), (LO, decoy, eth(1)))
    assert addresses(infos) == ("10.0.0.1",)


def test_a_network_that_all_hosts_share_comes_first() -> None:
    own = Interface("eth9", "192.168.7.1", "192.168.7.0/24")
    hosts = [(LO, own, eth(0, "eth1")), (LO, eth(1)), (LO, eth(2))]
    assert addresses(ranks_on(*hosts)) == ("10.0.0.1", "192.168.7.1")
    assert reasons(ranks_on(*hosts)) == [
        "eth1 of node0 is on 10.0.0.0/24, as is every other host",
        "eth9 of node0 is on 192.168.7.0/24, which others reach by a router",
    ]


def test_two_shared_networks_are_both_candidates_for_the_reachable() -> None:
    hosts = [(LO, eth(node), eth(node, "eth1", "10.9.0")) for node in range(2)]
    assert addresses(ranks_on(*hosts)) == ("10.0.0.1", "10.9.0.1")


def test_interface_names_may_differ_between_hosts() -> None:
    infos = ranks_on((LO, eth(0, "eth0")), (LO, eth(1, "ens5")))
    (address,) = addresses(infos)
    assert [info.interface_towards(address) for info in infos] == ["eth0", "ens5"]


def test_ipv6_is_used_only_without_ipv4() -> None:
    six = [Interface("eth0", f"fd00::{node + 1}", "fd00::/64") for node in range(2)]
    assert addresses(ranks_on(*((LO, each) for each in six))) == ("fd00::1",)
    both = [(LO, six[node], eth(node, "eth1")) for node in range(2)]
    assert addresses(ranks_on(*both)) == ("10.0.0.1", "fd00::1")


def test_no_address_that_other_hosts_can_reach() -> None:
    infos = ranks_on((LO, DOCKER0), (LO, DOCKER0, eth(1)))
    values = ("node0,", " lo 127.0.0.1, docker0 172.17.0.1.", ": --master-addr ADDR ")
    sentence = error("one: --master-addr", *values)
    assert re.fullmatch(sentence, refusal(lambda: choose(infos, {})))


def test_an_unreachable_candidate_names_the_host_that_is_cut_off() -> None:
    infos = ranks_on(*((LO, eth(node)) for node in range(3)))
    sentence = unreachable(infos, ["10.0.0.1"], [["10.0.0.1"], ["10.0.0.1"], []])
    assert sentence.startswith("node2 ")
    values = (" node0 (10.0.0.1) ", " 2 s", ": --master-addr ADDR ")
    assert re.fullmatch(error("a firewall", *values), sentence)


# --- the user's requests ---


@pytest.mark.parametrize("requested", ["eth1", "10.9.0.0/24", "10.9.0.0/16", "10.9.0.77/24"])
def test_a_requested_interface_or_network(requested: str) -> None:
    hosts = [(LO, eth(node), eth(node, "eth1", "10.9.0")) for node in range(2)]
    assert addresses(ranks_on(*hosts), {"MPIDDP_INTERFACE": requested}) == ("10.9.0.1",)


def test_a_requested_network_matches_interfaces_with_different_names() -> None:
    infos = ranks_on((LO, eth(0, "eth0")), (LO, eth(1, "ens5")))
    assert addresses(infos, {"MPIDDP_INTERFACE": "10.0.0.0/24"}) == ("10.0.0.1",)


@pytest.mark.parametrize(
    ("requested", "sentence"),
    [
        ("ib0", error("interface", '"ib0"', " node0,", " lo and eth0.")),
        ("eth0", error("interface", '"eth0"', " node1,", " lo and ens5.")),
        (
            "10.8.0.0/16",
            error("interface", '"10.8.0.0/16"', " node0,", " lo and eth0."),
        ),
        ("10.0/x", error("interface", '"10.0/x"', " node0,", " lo and eth0.")),
        ("lo", error("one: --master-addr", "node0,", ": --master-addr ADDR ")),
    ],
)
def test_a_requested_interface_that_a_host_lacks(requested: str, sentence: str) -> None:
    infos = ranks_on((LO, eth(0, "eth0")), (LO, eth(1, "ens5")))
    refused = refusal(lambda: choose(infos, {"MPIDDP_INTERFACE": requested}))
    assert re.fullmatch(sentence, refused)


def test_master_addr_is_honoured_but_not_as_a_loopback_over_hosts() -> None:
    two = ranks_on((LO, eth(0)), (LO, eth(1)))
    assert addresses(two, {"MASTER_ADDR": "192.0.2.7"}) == ("192.0.2.7",)
    assert addresses(two[:1], {"MASTER_ADDR": "127.0.0.5"}) == ("127.0.0.5",)
    localhost = {"MASTER_ADDR": "localhost"}
    assert addresses(two, localhost) == ("10.0.0.1",)
    assert reasons(two, localhost)[0].startswith("localhost resolves to 127.0.0.1, which no other")


def test_empty_variables_request_nothing() -> None:
    empty = {"MASTER_ADDR": "", "MASTER_PORT": "", "MPIDDP_INTERFACE": ""}
    assert addresses(ranks_on((LO, eth(0)), (LO, eth(1))), empty) == ("10.0.0.1",)
    assert port_in(empty) == 0


@pytest.mark.parametrize("port", ["abc", "65536", "-1", "1.5", "²", " 80"])
def test_an_invalid_port_is_refused(port: str) -> None:
    sentence = error("65535, or", f'MASTER_PORT="{port}"', "1 to 65535")
    assert re.fullmatch(sentence, refusal(lambda: port_in({"MASTER_PORT": port})))


def test_a_name_without_an_address_is_refused() -> None:
    sentence = error("host where", "a..b: ", f" {HERE}.", "MASTER_ADDR")
    assert re.fullmatch(sentence, refusal(lambda: resolve("a..b")))


@pytest.mark.parametrize(
    ("number", "kind", "sentence"),
    [
        (socket.EAI_NONAME, UserError, error("host where", "node1: ", HERE)),
        (socket.EAI_AGAIN, JobFailed, error(":", "node1: ", HERE, ": an answer.")),
    ],
)
def test_a_name_server_that_does_not_answer_is_no_bad_input(
    monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception], sentence: str
) -> None:
    def getaddrinfo(*arguments: object, **options: object) -> None:
        raise socket.gaierror(number, "an answer")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with pytest.raises(kind, match=sentence):
        resolve("node1")


# --- real sockets ---


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with bind("127.0.0.1", 0, "here") as bound:
        yield bound


def test_a_bound_address_is_reachable_and_no_other_is() -> None:
    with bind("127.0.0.1", 0, HERE) as first, bind("127.0.0.2", 0, HERE) as second:
        both = ["127.0.0.1", "127.0.0.2"]
        assert sorted(reachable(both, [port_of(first), port_of(second)])) == both
        assert reachable(["127.0.0.3"], [port_of(first)]) == []


def test_a_port_in_use_is_refused(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    port = port_of(listener)
    monkeypatch.setenv("MASTER_PORT", str(port))
    sentence = error("let mpiddp", f"MASTER_PORT={port} ", f" {HERE} (127.0.0.1)")
    assert re.fullmatch(sentence, refusal(lambda: bind("127.0.0.1", port, HERE)))


def test_an_address_of_another_host_is_refused() -> None:
    sentence = error("runs. Unset", "192.0.2.7 ", f" {HERE},", "MASTER_ADDR")
    assert re.fullmatch(sentence, refusal(lambda: bind("192.0.2.7", 0, HERE)))


def test_a_machine_without_files_is_no_bad_input() -> None:
    sentence = error("rank 0 cannot", "rank 0 ", "127.0.0.1", HERE, "Too many open files")
    with files_left(0), pytest.raises(JobFailed, match=sentence):
        bind("127.0.0.1", 0, HERE)


def test_probe_finds_the_address_that_answers(listener: socket.socket) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # refuses: it does not listen
        assert reachable(["127.0.0.1"], [port_of(bound)]) == []
    assert reachable(["127.0.0.1"], [port_of(listener)]) == ["127.0.0.1"]


def test_probe_treats_an_address_without_route_as_unreachable(listener: socket.socket) -> None:
    """connect() to such an address fails at once. Its socket then looks writable and has no error."""
    unroutable = "255.255.255.255"
    assert reachable([unroutable], [1]) == []
    assert reachable([unroutable, "127.0.0.1"], [1, port_of(listener)]) == ["127.0.0.1"]


def test_probe_waits_for_a_silent_address_only_until_the_timeout(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "PROBE_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.2", 0), backlog=0) as silent:
        clients = [socket.socket() for _ in range(4)]  # with a full backlog, the address is silent
        for each in clients:
            each.setblocking(False)
            each.connect_ex(silent.getsockname())
        begin = time.monotonic()
        assert reachable(["127.0.0.2"], [port_of(silent)]) == []
        assert time.monotonic() - begin >= 0.2
        monkeypatch.setattr(sockets, "PROBE_TIMEOUT_S", 30.0)
        begin = time.monotonic()
        answered = reachable(["127.0.0.1", "127.0.0.2"], [port_of(listener), port_of(silent)])
        assert answered == ["127.0.0.1"]
        # The best address has answered, so the others get less time.
        assert time.monotonic() - begin < 15
        for each in clients:
            each.close()


def test_this_host_has_a_loopback_interface() -> None:
    found = {interface.name: interface for interface in interfaces()}
    assert found["lo"] == LO
    assert found["lo"].is_loopback


def test_a_rank_info_survives_json() -> None:
    (info,) = ranks_on((LO, eth(0)))
    (found,) = gathered(json.loads(json.dumps([info.as_json()])))
    assert found == info._replace(interfaces=list(info.interfaces), program=[])


def test_allow_open_raises_the_limit_for_a_large_job() -> None:
    """The usual limit is 1024, and 1024 ranks have several connections each."""
    code = (
        "import os, resource\n"
        "from mpiddp.hosts.sockets import allow_open\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))\n"
        "allow_open(400)\n"
        "print(len([os.pipe() for _ in range(150)]))\n"
        "allow_open(10**12)\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stdout) == (0, "150\n"), done.stderr
