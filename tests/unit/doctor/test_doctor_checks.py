"""The checks of `mpiddp doctor` as functions: what the hosts say, and the line that names the odd one.

Tests mpiddp/doctor/{compare,network,job,report}.py.
python -m pytest tests/unit/doctor/test_doctor_checks.py
"""

from __future__ import annotations

import json
import socket
from copy import deepcopy

import pytest

from mpiddp.doctor import compare, network
from mpiddp.doctor.report import FAIL, OK, UNKNOWN, WARN, Line, as_json, results, text
from mpiddp.hosts import facts as hosts_facts
from mpiddp.hosts import gpus, interfaces
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.remote import PROOF, Connections, program_with
from mpiddp.hosts.transport import SSH
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
    "links": [],
    "names": {"a": ["10.0.0.1"], "b": ["10.0.0.2"], "c": ["10.0.0.3"]},
    "limits": {"open files": 65536, "locked memory": -1, "processes": 4096},
    "cores": 8,
    "cores for a process": 8,
    "shm": 8_000_000_000,
    "infiniband": False,
    "folders": {"run": {"path": "/r", "is_written": True, "error": "", "free": 10**12}},
    "files": {"/w/train.py": {"hash": "1f3a", "error": ""}},
    "gpus": {"each": [GPU], "users": []},
}


@pytest.fixture
def facts():
    """What three healthy hosts say."""
    found = {name: deepcopy(HEALTHY) for name in "abc"}
    for number, name in enumerate("abc", start=1):
        address = f"10.0.0.{number}"
        link = {
            "name": "eth0",
            "address": address,
            "speed": "100 Gbit/s",
            "mtu": "9000",
            "state": "up",
        }
        found[name] |= {"hostname": name, "addresses": [address], "links": [link]}
    return found


ADDRESSES = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}


def everything(facts):
    return [
        *compare.names(facts),
        *compare.gpus(facts),
        *compare.processes(facts, "in a rank"),
        *compare.folders(facts),
        *compare.files(facts),
        *compare.links(facts, ADDRESSES),
    ]


def test_nothing_is_wrong_with_healthy_hosts(facts):
    assert everything(facts) == []
    assert results("names", compare.names(facts), "all") == [Line("names", OK, "all")]


def the_one(found):
    """The status and the fact of the only thing that is wrong."""
    ((status, fact, _),) = found
    return status, fact


@pytest.mark.parametrize(
    ("path", "value", "status", "fact"),
    [
        (("names", "c"), [], WARN, "c cannot be resolved from b"),
        (("gpus", "each"), [], FAIL, "the number of GPUs is 0 on b, 1 on the other 2 hosts"),
        (("limits", "open files"), 512, FAIL, "a process may open 512 files on b (in a rank)"),
        (("files", "/w/train.py", "hash"), "9c2e", FAIL,
         "/w/train.py is 9c2e on b, 1f3a on the other 2 hosts"),
        (("folders", "run", "free"), 10e6, FAIL, "the run folder /r has 10.0 MB left on b"),
        (("folders", "run", "error"), "Permission denied", FAIL,
         "the run folder /r cannot be used on b: Permission denied; a and c can"),
    ],
)  # fmt: skip
def test_the_odd_host_is_named(facts, path, value, status, fact):
    inner = facts["b"]
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    assert the_one(everything(facts)) == (status, fact)


def test_a_script_that_no_host_has_is_not_the_same_on_every_host(facts):
    for found in facts.values():
        found["files"] = {path: hosts_facts._file(path) for path in ("/w/none.py", "/")}
    assert [found[:2] for found in compare.files(facts)] == [
        (FAIL, "/w/none.py is missing on a, b and c"),
        (FAIL, "/ cannot be read (Is a directory) on a, b and c"),
    ]


def test_gpus_that_do_not_answer_or_count_no_errors(facts):
    facts["b"]["gpus"] = None
    assert the_one(everything(facts)) == (FAIL, "nvidia-smi does not answer on b")
    facts["b"]["gpus"] = deepcopy(HEALTHY["gpus"])
    facts["b"]["gpus"]["each"][0]["ecc.errors.uncorrected.volatile.total"] = "[N/A]"
    assert the_one(everything(facts))[0] == UNKNOWN
    facts["b"]["gpus"]["each"][0]["ecc.errors.uncorrected.volatile.total"] = "2"
    assert the_one(everything(facts)) == (FAIL, "uncorrected memory errors on b: GPU 0: 2")


def test_without_a_majority_each_value_has_its_hosts():
    assert compare.differences("torch", {"a": 1, "b": 2}) == "torch differs: 1 on a, 2 on b"
    assert compare.differences("torch", {"a": 1, "b": 1, "c": 2}) == (
        "torch is 2 on c, 1 on the other 2 hosts"
    )
    assert compare.differences("torch", {"a": 1, "b": 1}) == ""


def test_a_package_that_does_not_load_hides_no_other():
    well = {"python": "3.11.7", "torch": "2.13.0", "libnccl": "/v/libnccl.so.2", "mpi4py": "4.1"}
    broken = {"python": "3.11.7", "torch": "broken: no libcudart", "mpi4py": "4.1"}
    found = compare.stacks({"a": well, "b": broken, "c": well})
    assert the_one(found) == (FAIL, "torch does not load on b: no libcudart")
    found = compare.stacks({"a": well, "b": {**well, "libnccl": "/usr/libnccl.so.2"}, "c": well})
    fact = "libnccl is /usr/libnccl.so.2 on b, /v/libnccl.so.2 on the other 2 hosts"
    assert the_one(found) == (WARN, fact)
    other = {"a": well, "b": {**well, "torch": "2.12.1"}}
    assert [*compare.stacks(other, already=("torch",))] == []


def test_a_clock_that_is_wrong():
    behind = the_one(compare.clocks({"a": 0.1, "b": -40.0, "c": 0.0}))
    assert behind == (WARN, "the clock of b is 40.0 s behind the others")
    assert [*compare.clocks({"a": 0.1, "b": -0.4, "c": 0.0})] == []
    apart = the_one(compare.clocks({"a": 1.95, "b": -1.95}))
    assert apart == (WARN, "the clock of a is 3.9 s ahead of the others")


def test_a_slow_device_is_named_from_three_hosts_on():
    slow = the_one(compare.speeds({"a": 100.0, "b": 79.0, "c": 101.0}))
    assert slow == (WARN, "b is slow: 79 % of the others' speed")
    assert [*compare.speeds({"a": 100.0, "b": 85.0, "c": 120.0})] == []
    assert [*compare.speeds({"a": 100.0, "b": 10.0})] == []


def answers(**errors):
    """What each host says of each other. `errors`: "ab" is that from a to b."""
    return {
        here: {
            there: {"error": errors.get(here + there, ""), "large": ""}
            for there in "abc"
            if there != here
        }
        for here in "abc"
    }


def test_all_pairs_of_hosts():
    def reach(found):
        return the_one(compare.reach(found, ADDRESSES))[1]

    assert [*compare.reach(answers(), ADDRESSES)] == []
    said = reach(answers(ba="no answer in 3 s"))
    assert said == "b → a (10.0.0.1) fails: no answer in 3 s; a → b is open"
    said = reach(answers(ab="refused", cb="refused"))
    assert said == "no other host reaches b (10.0.0.2): refused"
    large = answers()
    large["a"]["b"]["large"] = "no answer in 3 s"
    said = reach(large)
    assert said == "a → b carries small messages but no large ones (no answer in 3 s)"


def test_what_was_not_tried_is_unknown(facts):
    """As between hosts that did not answer in time."""
    assert the_one(compare.links(facts, {})) == (UNKNOWN, "no host told of its link")
    untried = (UNKNOWN, "no direction between the hosts was tried")
    assert the_one(compare.reach({}, {})) == untried


def test_the_report_says_first_what_is_not_well():
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


def test_the_program_of_a_host_needs_only_the_standard_library(tmp_path):
    begin = f"sys.modules[{network.__name__!r}].main({PROOF!r})"
    program = program_with((interfaces, gpus, hosts_facts, network), begin)
    wanted = {"names": ["localhost"], "folders": {}, "files": [], "path": str(tmp_path)}
    here = Host("localhost")
    with Connections([here], SSH, program) as connected:
        (found,) = connected.ask({here: wanted}, limit_s=PATIENCE_S).values()
        peer = {"name": "a", "address": "127.0.0.1", "port": found["port"]}
        (reached,) = connected.ask({here: [peer]}, limit_s=PATIENCE_S).values()
        assert abs(connected.by_host[here].skew) < PATIENCE_S
    assert (found["gpus"], reached) == ({}, {"a": {"error": "", "large": ""}})
    assert found["names"]["localhost"]
    assert found["limits"].keys() == hosts_facts.LIMITS.keys()


def test_a_program_that_fails_is_asked_no_more():
    here = Host("localhost")
    with Connections([here], SSH, "raise SystemExit('no memory')") as connected:
        assert [connected.ask({here: 1}, limit_s=PATIENCE_S) for _ in range(2)] == [{}, {}]
        assert connected.by_host[here].failure == "localhost: the connection was lost, no memory"
    with Connections([here], SSH, "import time; time.sleep(1000)") as connected:
        connected.ask({here: 1}, limit_s=0.2)
        assert connected.by_host[here].failure == "localhost: no answer in time"


def test_a_port_on_which_nobody_listens():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        (answer,) = network.reach([{"name": "a", "address": "127.0.0.1", "port": port}]).values()
    assert answer["error"] == "Connection refused"
