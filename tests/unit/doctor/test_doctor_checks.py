"""The checks of `mpiddp doctor` as functions: what the hosts say, and the line that names the odd one.

Tests mpiddp/doctor/{main,compare,job}.py and mpiddp/hosts/network.py.
python -m pytest tests/unit/doctor/test_doctor_checks.py
"""

import pytest

from mpiddp.doctor import compare
from mpiddp.doctor.compare import FAIL, UNKNOWN, WARN
from mpiddp.doctor.main import main
from mpiddp.errors import UserError
from mpiddp.hosts import facts as hosts_facts
from mpiddp.hosts.gpus import Gpu
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.remote import ask_hosts, program_that_prints
from mpiddp.hosts.transport import Transport
from mpiddp.launch.preflight import TRAVELLING
from tests.support.errors import error
from tests.support.machine import an_mpirun
from tests.support.patience import PATIENCE_S

GPU = Gpu("NVIDIA H100", "0000:18:00.0", "GPU-1", 0, 0, 1 << 36, 31, "", 0, "580.1", "1980")
ADDRESSES = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}


@pytest.fixture
def facts():
    """What three healthy hosts say."""
    return {
        name: {
            "hostname": name,
            "addresses": [address],
            "links": [{"name": "eth0", "address": address, "speed": "100 Gbit/s", "mtu": "9000"}],
            "names": {each: [known] for each, known in ADDRESSES.items()},
            "limits": {"open files": 65536, "locked memory": -1, "processes": 4096},
            "cores": 8,
            "cores for a process": 8,
            "shm": 8_000_000_000,
            "infiniband": False,
            "folders": {"run": {"path": "/r", "is_written": True, "error": "", "free": 10**12}},
            "files": {"train.py": "1f3a"},
            "gpus": [GPU],
        }
        for name, address in ADDRESSES.items()
    }


def everything(facts):
    """The status and the fact of all that is wrong."""
    found = [
        *compare.names(facts),
        *compare.gpus({name: each["gpus"] for name, each in facts.items()}),
        *compare.processes(facts),
        *compare.folders(facts),
        *compare.files(facts),
        *compare.links(facts, ADDRESSES),
    ]
    return [each[:2] for each in found]


@pytest.mark.parametrize(
    ("path", "value", "status", "fact"),
    [
        (("names", "c"), [], WARN, "c cannot be resolved from b"),
        (("gpus",), [], FAIL, "the number of GPUs is 0 on b, 1 on the other 2 hosts"),
        (("gpus", 0), GPU._replace(driver="535.2"), FAIL,
         "the driver of the GPUs is 535.2 on b, 580.1 on the other 2 hosts"),
        (("gpus", 0), GPU._replace(memory_total=48 << 30), WARN,
         "the memory total of the GPUs is 51.5 GB on b, 68.7 GB on the other 2 hosts"),
        (("gpus", 0), GPU._replace(errors=None), UNKNOWN,
         "a GPU of b does not count errors of its memory (ECC)"),
        (("limits", "open files"), 512, FAIL, "a process may open 512 files on b"),
        (("files", "train.py"), "9c2e", FAIL, "train.py is 9c2e on b, 1f3a on the other 2 hosts"),
        (("files", "model.py"), "1f3a", FAIL, "model.py is missing or unreadable on a and c"),
        (("files", "train.py"), "", FAIL, "train.py is missing or unreadable on b"),
        (("folders", "run", "free"), 10e6, FAIL, "the run folder /r has 10.0 MB left on b"),
        (("folders", "run", "error"), "Permission denied", FAIL,
         "the run folder /r cannot be used on b: Permission denied; a and c can"),
    ],
)  # fmt: skip
def test_the_odd_host_is_named(facts, path, value, status, fact):
    assert everything(facts) == []
    inner = facts["b"]
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    assert everything(facts) == [(status, fact)]


def test_without_a_majority_each_value_has_its_hosts():
    assert compare.differences("torch", {"a": 1, "b": 2}) == "torch differs: 1 on a, 2 on b"
    assert compare.differences("torch", {"a": 1, "b": 1}) == ""


def the_one(found):
    """The status and the fact of the only thing that is wrong."""
    ((status, fact, _),) = found
    return status, fact


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


@pytest.mark.parametrize(
    ("skews", "fact"),
    [
        ((0.1, -40.0, 0.0), "the clock of b is 40.0 s behind the others"),
        ((0.1, -0.4, 0.0), ""),
        ((1.95, -1.95), "the clock of a is 3.9 s ahead of the others"),
    ],
)
def test_a_clock_that_is_wrong(skews, fact):
    found = compare.clocks(dict(zip("abc", skews, strict=False)))
    assert [each[:2] for each in found] == ([(WARN, fact)] if fact else [])


@pytest.mark.parametrize(
    ("speeds", "fact"),
    [
        ((100.0, 79.0, 101.0), "b is slow: 79 % of the others' speed"),
        ((100.0, 85.0, 120.0), ""),
        ((100.0, 10.0), ""),  # of two, either may be the odd one
    ],
)
def test_a_slow_device_is_named_from_three_hosts_on(speeds, fact):
    found = compare.speeds(dict(zip("abc", speeds, strict=False)))
    assert [each[:2] for each in found] == ([(WARN, fact)] if fact else [])


@pytest.mark.parametrize(
    ("errors", "fact"),
    [
        ({}, ""),
        ({"ba": "no answer in 3 s"},
         "b → a (10.0.0.1 tcp/41) fails: no answer in 3 s; a → b is open"),
        ({"ab": "refused", "cb": "refused"}, "no other host reaches b (10.0.0.2 tcp/41): refused"),
        ({"ab large": "no answer in 3 s"},
         "a → b carries small messages but no large ones (no answer in 3 s)"),
    ],
)  # fmt: skip
def test_all_pairs_of_hosts(errors, fact):
    """`errors`: "ab" is that from a to b."""
    answers = {
        here: {
            there: {
                "error": errors.get(here + there, ""),
                "large": errors.get(f"{here}{there} large", ""),
            }
            for there in "abc".replace(here, "")
        }
        for here in "abc"
    }
    found = compare.reach(answers, ADDRESSES, 41)
    assert [each[:2] for each in found] == ([(FAIL, fact)] if fact else [])


def test_what_was_not_tried_is_unknown(facts):
    """As between hosts that did not answer in time."""
    assert the_one(compare.links(facts, {})) == (UNKNOWN, "no host told of its link")
    untried = (UNKNOWN, "no direction between the hosts was tried")
    assert the_one(compare.reach({}, {}, 41)) == untried


def test_this_machine_alone_needs_no_ssh(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(Transport, "is_installed", False)
    mpirun = an_mpirun(tmp_path)
    assert main(["-H", "localhost:1", "--quick", "--mpirun", mpirun]) == 0
    assert "no other host was to be asked" in capsys.readouterr().out
    with pytest.raises(UserError, match=error("openssh-client")):
        main(["-H", "localhost:1,n1.invalid:1", "--quick", "--mpirun", mpirun])


def test_the_program_of_a_host_needs_only_the_standard_library():
    wanted = {
        "names": ["localhost"],
        "folders": {},
        "program": ("", "", "", []),
    }
    call = f"doctor_facts({wanted!r})"
    program = program_that_prints(TRAVELLING, call)
    found, failures, _ = ask_hosts([Host("localhost")], program, work_s=PATIENCE_S)
    assert failures == {}
    (facts,) = found.values()
    assert facts["limits"].keys() == hosts_facts.LIMITS.keys()
    assert facts["names"]["localhost"]
