"""The checks of `mpiddp doctor` as functions: what the hosts say, and the line that names the odd one.

Tests mpiddp/doctor/agent.py, compare.py, links.py, report.py.
python -m pytest tests/unit/doctor/test_doctor_checks.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from copy import deepcopy
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from mpiddp.doctor import agent, compare, links
from mpiddp.doctor.hosts import agent_program
from mpiddp.doctor.report import FAIL, OK, UNKNOWN, WARN, Line, as_json, text
from mpiddp.errors import UserError
from tests.support.an_mpirun import an_mpirun
from tests.support.errors import error
from tests.support.patience import PATIENCE_S

GPU = {
    "index": "0",
    "name": "NVIDIA H200",
    "memory.total": "143771",
    "memory.used": "0",
    "driver_version": "570.1",
    "clocks.max.sm": "1980",
    "ecc.errors.uncorrected.volatile.total": "0",
}
HEALTHY = {
    "hostname": "",
    "addresses": [],
    "interfaces": [],
    "names": {"a": ["10.0.0.1"], "b": ["10.0.0.2"], "c": ["10.0.0.3"]},
    "limits": {"open files": 65536, "locked memory": -1, "processes": 4096},
    "cores": 8,
    "cores for a process": 8,
    "shm": {"total": 8_000_000_000, "free": 8_000_000_000},
    "infiniband": False,
    "ports": [32768, 60999],
    "load": 0.3,
    "folders": {"run": {"path": "/r", "keeps": True, "error": "", "free": 10**12, "entries": ""}},
    "files": {"/w/train.py": {"hash": "1f3a", "error": ""}},
    "gpus": {"each": [GPU], "users": [], "xids": []},
}


@pytest.fixture
def facts() -> dict[str, Any]:
    """What three healthy hosts say."""
    found = {name: deepcopy(HEALTHY) for name in "abc"}
    for number, name in enumerate("abc", start=1):
        address = f"10.0.0.{number}"
        interface = {"name": "eth0", "address": address, "network": "10.0.0.0/24", "mtu": 9000}
        found[name] |= {"hostname": name, "addresses": [address], "interfaces": [interface]}
    return found


ADDRESSES = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}


def everything(facts: dict[str, Any]) -> list[Line]:
    return [
        *compare.names(facts),
        *compare.gpus(facts),
        *compare.processes(facts, "in a launched process"),
        *compare.folders(facts, {"a": 3, "b": 3, "c": 3}),
        *compare.files(facts),
        *links.mtu(facts, ADDRESSES),
    ]


def test_healthy_hosts_have_no_other_line_than_ok(facts: dict[str, Any]) -> None:
    assert {line.status for line in everything(facts)} == {OK}
    assert len(everything(facts)) == 6


def the_one(facts: dict[str, Any]) -> Line:
    """The only line that is not ok."""
    (line,) = [line for line in everything(facts) if line.status != OK]
    return line


@pytest.mark.parametrize(
    ("path", "value", "status", "fact"),
    [
        (("names", "c"), [], WARN, "c cannot be resolved from b"),
        (
            ("names", "c"),
            ["10.9.9.9"],
            WARN,
            "c resolves to 10.9.9.9 on b, which is no address of c",
        ),
        (("gpus", "each"), [], FAIL, "the number of GPUs is 0 on b, 1 on the other 2 hosts"),
        (("gpus", "xids"), ["Xid 79"], WARN, "the kernel's log on b has Xid 79"),
        (
            ("gpus", "xids"),
            None,
            UNKNOWN,
            "the kernel's log on b may not be read, so no Xid was sought",
        ),
        (("gpus", "users"), ["12, 900"], WARN, "the GPUs of b are in use (pid, MiB): 12, 900"),
        (
            ("cores",),
            4,
            WARN,
            "the number of cores is 4 on b, 8 on the other 2 hosts (in a launched process)",
        ),
        (
            ("limits", "open files"),
            512,
            FAIL,
            "a process may open 512 files on b (in a launched process)",
        ),
        (("shm", "total"), 64e6, WARN, "/dev/shm holds 64.0 MB on b"),
        (
            ("files", "/w/train.py", "hash"),
            "9c2e",
            FAIL,
            "/w/train.py is 9c2e on b, 1f3a on the other 2 hosts",
        ),
        (("folders", "run", "free"), 10e6, FAIL, "the run folder /r has 10.0 MB left on b"),
        (
            ("folders", "run", "error"),
            "Permission denied",
            FAIL,
            "the run folder /r cannot be used on b: Permission denied; a and c can",
        ),
    ],
)
def test_the_odd_host_is_named(
    facts: dict[str, Any], path: tuple[str, ...], value: object, status: str, fact: str
) -> None:
    inner = facts["b"]
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    assert (the_one(facts).status, the_one(facts).fact) == (status, fact)


def test_a_script_that_no_host_has_is_not_the_same_on_every_host(facts: dict[str, Any]) -> None:
    for found in facts.values():
        found["files"] = {"/w/none.py": agent._file("/w/none.py"), "/": agent._file("/")}
    assert [(line.status, line.fact) for line in compare.files(facts)] == [
        (FAIL, "/w/none.py is missing on a, b and c"),
        (FAIL, "/ cannot be read (Is a directory) on a, b and c"),
    ]


def test_an_interface_that_has_just_gone() -> None:
    assert agent._mtu("lo") > 0
    assert agent._mtu("none0") == 0


def test_an_own_name_that_leads_to_the_loopback(facts: dict[str, Any]) -> None:
    facts["b"]["names"]["b"] = ["127.0.1.1"]
    assert (
        the_one(facts).fact
        == "b's own name resolves to 127.0.1.1 there, which no other host can reach"
    )


def test_gpus_that_do_not_answer_or_count_no_errors(facts: dict[str, Any]) -> None:
    facts["b"]["gpus"] = None
    assert the_one(facts).fact == "nvidia-smi does not answer on b"
    facts["b"]["gpus"] = deepcopy(HEALTHY["gpus"])
    facts["b"]["gpus"]["each"][0]["ecc.errors.uncorrected.volatile.total"] = "[N/A]"
    assert the_one(facts).status == UNKNOWN
    facts["b"]["gpus"]["each"][0]["ecc.errors.uncorrected.volatile.total"] = "2"
    assert the_one(facts).fact == "uncorrected memory errors on b: GPU 0: 2"


def test_infiniband_needs_unlimited_locked_memory(facts: dict[str, Any]) -> None:
    for found in facts.values():
        found["limits"]["locked memory"] = 65536
    assert {line.status for line in everything(facts)} == {OK}
    facts["b"]["infiniband"] = True
    assert the_one(facts).fact.startswith("locked memory is limited on b, which InfiniBand needs")


def test_without_a_majority_each_value_has_its_hosts() -> None:
    assert compare.differences("torch", {"a": 1, "b": 2}) == "torch differs: 1 on a, 2 on b"
    assert compare.differences("torch", {"a": 1, "b": 1, "c": 2}) == (
        "torch is 2 on c, 1 on the other 2 hosts"
    )
    assert compare.differences("torch", {"a": 1, "b": 1}) == ""


def test_a_package_that_does_not_load_hides_no_other() -> None:
    well = {"python": "3.11.7", "torch": "2.13.0", "libnccl": "/v/libnccl.so.2", "mpi4py": "4.1"}
    broken = {"python": "3.11.7", "torch": "broken: no libcudart", "mpi4py": "4.1"}
    (line,) = compare.stacks({"a": well, "b": broken, "c": well})
    assert (line.status, line.fact) == (FAIL, "torch does not load on b: no libcudart")
    (line,) = compare.stacks({"a": well, "b": {**well, "libnccl": "/usr/libnccl.so.2"}, "c": well})
    assert (line.status, line.fact) == (
        WARN,
        "libnccl is /usr/libnccl.so.2 on b, /v/libnccl.so.2 on the other 2 hosts",
    )
    (line,) = compare.stacks({"a": well, "b": {**well, "torch": "2.12.1"}}, already=("torch",))
    assert line.status == OK


def test_a_clock_that_is_wrong() -> None:
    (line,) = compare.clocks({"a": 0.1, "b": -40.0, "c": 0.0})
    assert line.fact == "the clock of b is 40.0 s behind"
    (line,) = compare.clocks({"a": 0.1, "b": -0.4, "c": 0.0})
    assert line.status == OK


@pytest.mark.parametrize("others", [{}, {"c": 0.0}])
def test_clocks_of_which_none_is_the_odd_one(others: dict[str, float]) -> None:
    (line,) = compare.clocks({"a": 1.95, "b": -1.95, **others})
    assert (line.status, line.fact) == (WARN, "the clocks of b and a are 3.9 s apart")
    off = [line.fact for line in compare.clocks({"a": 0.0, "b": 0.0, "c": 9.0, "d": 9.0})]
    assert off == ["the clock of c is 9.0 s ahead", "the clock of d is 9.0 s ahead"]


def test_the_runs_of_one_host_are_not_said_to_be_shared(facts: dict[str, Any]) -> None:
    well = "present, readable and with space"
    assert [line.fact for line in compare.folders({"a": facts["a"]}, {"a": 1})] == [well]
    for marks, more in ({"a": 2, "b": 2}, "shared"), ({"a": 1, "b": 1}, "not shared"):
        (line,) = compare.folders(facts, marks)
        assert line.fact == f"{well}; runs are {more}"


def test_a_data_folder_is_known_by_its_regular_files(tmp_path: Path) -> None:
    """The size of a folder's inode is the file system's; a link may lead nowhere."""

    def entries() -> str:
        found = agent._folder(str(tmp_path), "data")
        assert found["error"] == ""
        return str(found["entries"])

    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "file").write_text("1")
    before = entries()
    for number in range(1000):
        (tmp_path / "folder" / f"{number:0100}").touch()
    assert entries() == before
    (tmp_path / "file").write_text("12")
    assert entries() != before


def test_a_slow_host() -> None:
    values = {"a": {"memory copy": 100.0}, "b": {"memory copy": 85.0}, "c": {"memory copy": 102.0}}
    (line,) = compare.speeds(values)
    assert line.fact == "b is slow: memory copy at 84 % of the others'"
    values["a"]["memory copy"], values["c"]["memory copy"] = (
        80.0,
        130.0,
    )  # the others differ as much
    assert compare.slow_hosts(values) == {}
    (line,) = compare.speeds(values)
    assert line == Line("speed", OK, "no host is slow at memory copy")


def test_all_reduces_of_busy_hosts_are_not_compared(facts: dict[str, Any]) -> None:
    assert compare.busy(facts) == {}
    assert compare.unjudged(facts) == []
    facts["b"]["load"] = 7.0
    (line,) = compare.unjudged(facts)
    assert (line.status, line.fact) == (
        UNKNOWN,
        "all-reduces of gloo are not compared: other programs run on b (load 7.0 on 8 cores)",
    )


def test_what_was_not_measured_is_unknown() -> None:
    values = {name: {"disk": 1e8, "copy from host to device": 2e10} for name in "abc"}
    del values["b"]["copy from host to device"]
    (line,) = compare.speeds(values)
    assert (line.status, line.fact) == (UNKNOWN, "copy from host to device was not measured on b")
    (line,) = compare.speeds({"a": {"disk": 1e8}, "b": {"disk": 1e7}})
    assert (line.status, line.fact) == (UNKNOWN, "2 hosts cannot tell which one is slow: 3 can")


def answers(**errors: str) -> dict[str, dict[str, Any]]:
    """What each host says of each other. `errors`: "ab" is that from a to b."""
    return {
        here: {
            there: {
                "error": errors.get(here + there, ""),
                "large": "",
                "source": ADDRESSES[here],
                "closed": {},
            }
            for there in "abc"
            if there != here
        }
        for here in "abc"
    }


def test_all_pairs_of_hosts(facts: dict[str, Any]) -> None:
    def reach(found: dict[str, dict[str, Any]]) -> Line:
        (line,) = links.reach(found, ADDRESSES, facts)
        return line

    assert reach(answers()) == Line("network", OK, "all 6 directions open, over eth0")
    line = reach(answers(ba="no answer in 3 s"))
    assert line.fact == "b → a (10.0.0.1) fails: no answer in 3 s; a → b is open"
    line = reach(answers(ab="refused", cb="refused"))
    assert line.fact == "no other host reaches b (10.0.0.2): refused"
    large, other = answers(), answers()
    large["a"]["b"]["large"] = "no answer in 3 s"
    other["a"]["b"]["source"] = "172.17.0.1"
    line = reach(large)
    assert line.fact == "a → b carries small messages but no large ones (no answer in 3 s)"
    assert reach(other).fact == "a → b takes 172.17.0.1, not the job's 10.0.0.1"


def test_ports_that_are_closed_or_taken(facts: dict[str, Any]) -> None:
    listening = {
        name: {"port": 40000, "ports": [29500, 32768, 60979], "busy": ""} for name in "abc"
    }
    found = answers(ca="no answer in 3 s")
    (line,) = links.ports(found, listening, facts)
    assert line == Line(
        "ports", OK, "3 ports tried in each direction, among them of 32768 to 60999"
    )
    found["a"]["b"]["closed"] = {"60979": "no answer in 3 s", "32768": "no answer in 3 s"}
    found["c"]["a"]["closed"] = {"32768": "no answer in 3 s"}  # as all of its ports are
    listening["c"]["busy"] = "Address already in use"
    busy, closed = links.ports(found, listening, facts)
    assert (busy.status, busy.fact) == (
        WARN,
        "MASTER_PORT cannot be had on c: Address already in use",
    )
    assert (closed.status, closed.fact, closed.mend) == (
        FAIL,
        "a → b fails at 32768 and 60979, and not at other ports: no answer in 3 s",
        "allow TCP from a on b at all of 32768 to 60999",
    )


def test_what_was_not_tried_is_unknown(facts: dict[str, Any]) -> None:
    """As between hosts that did not answer in time."""
    listening = {"a": {"port": 40000, "ports": [32768], "busy": ""}}
    unreached = {"a": {"b": {"error": "no route", "closed": {}}}}
    assert [
        (line.status, line.fact)
        for line in (
            *links.mtu(facts, {}),
            *links.reach({}, {}, facts),
            *links.ports({}, {}, facts),
            *links.ports(unreached, listening, facts),
            *links.second_networks({"10.1.0.0/24 (eth1)": {}}, {"10.0.0.1"}),
        )
    ] == [
        (UNKNOWN, "no host told the MTU of its interface"),
        (UNKNOWN, "no direction between the hosts was tried"),
        *[(UNKNOWN, "no port was tried: no direction between the hosts is open")] * 2,
        (UNKNOWN, "the network 10.1.0.0/24 (eth1) was not tried"),
    ]


def test_another_network_that_connects_no_hosts() -> None:
    dead = {
        here: {there: {**answer, "error": "no route"} for there, answer in each.items()}
        for here, each in answers().items()
    }
    (line,) = links.second_networks(
        {"10.1.0.0/24 (eth1)": dead, "10.2.0.0/24 (eth2)": answers()}, {"10.0.0.1"}
    )
    assert (line.status, line.fact) == (
        WARN,
        "the network 10.1.0.0/24 (eth1) connects no two hosts: no route",
    )
    (line,) = links.second_networks({"10.2.0.0/24 (eth2)": answers(ab="no route")}, {"10.0.0.1"})
    assert line.status == OK


def test_slow_links_and_other_mtus(facts: dict[str, Any]) -> None:
    pairs = {
        (here, there): {"rate": 1e9, "latency_ms": 0.1}
        for here in "abc"
        for there in "abc"
        if here != there
    }
    bandwidth, latency = links.rates(pairs)
    assert (bandwidth.status, latency.status) == (OK, OK)
    assert latency.fact == "0.10 to 0.10 ms for a round trip"
    pairs["c", "a"] = {"rate": 2e8, "latency_ms": 0.4}
    pairs["b", "a"] = {"rate": 1e9, "latency_ms": 1.4}
    bandwidth, latency = links.rates(pairs)
    assert bandwidth.fact == "c → a carries 200.0 MB/s, the middle pair 1.0 GB/s"
    assert latency.fact == "b → a and back takes 1.40 ms, the middle pair 0.10 ms"
    assert links.slow_pairs(pairs) == [("c", "a"), ("b", "a")]
    assert links.of_host(pairs, "b") == 1e9
    facts["b"]["interfaces"][0]["mtu"] = 1500
    assert the_one(facts).fact == "the MTU is 1500 on b, 9000 on the other 2 hosts"


@pytest.mark.parametrize("count", [2, 3, 8, 15])
def test_rounds_have_every_pair_once_and_no_host_twice(count: int) -> None:
    rounds = list(links.rounds(range(count)))
    for pairs in rounds:
        busy = [host for pair in pairs for host in pair]
        assert len(busy) == len(set(busy))
    assert sorted(tuple(sorted(pair)) for pairs in rounds for pair in pairs) == list(
        combinations(range(count), 2)
    )
    assert len(rounds) == count - 1 + count % 2


def test_the_report_says_first_what_is_not_well() -> None:
    lines = [
        Line("names", OK, "all"),
        Line("GPUs", UNKNOWN, "no answer"),
        Line("ssh", FAIL, "a: \x1b[2J", "ssh-copy-id a"),
        Line("clock", WARN, "b is late"),
    ]
    assert text(lines, 2, 1.25).splitlines() == [
        "2 hosts, 1 fail, 1 warn, 1 unknown, 1 ok, in 1.2 s",
        "fail     ssh    a: \\x1b[2J",
        "                → ssh-copy-id a",
        "warn     clock  b is late",
        "unknown  GPUs   no answer",
        "ok       names  all",
    ]
    assert json.loads(as_json(lines, ["a", "b"], 1.25))["status"] == FAIL


def test_the_agent_needs_only_the_standard_library_and_answers_each_question() -> None:
    program = f"import sys\nexec(sys.stdin.buffer.read({len(agent_program())}))"
    questions = [["nonsense", None], ["speed", None]]
    stdin = agent_program() + b"".join(json.dumps(each).encode() + b"\n" for each in questions)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program],
        input=stdin,
        cwd="/",
        capture_output=True,
        timeout=PATIENCE_S,
    )
    assert done.stderr == b""
    _, refusal, answer = done.stdout.splitlines()
    assert json.loads(refusal) == {"failed": "nonsense: KeyError: 'nonsense'"}
    assert json.loads(answer)["answer"].keys() == {"matrix product", "memory copy"}


def test_bad_usage_is_one_sentence(tmp_path: Path) -> None:
    from mpiddp.doctor.main import main

    usual = ["-H", "localhost", "--mpirun", an_mpirun(tmp_path)]
    with pytest.raises(
        UserError, match=error("--script", "--script nowhere.py ", f" {Path.cwd()})")
    ):
        main([*usual, "--script", "nowhere.py"])
    long = f"/{'x' * 300}"
    with pytest.raises(UserError, match=error(":", f"--script {long}: File name too long")):
        main([*usual, "--script", long])
