"""`mpiddp doctor` on real hosts: each fault has its line, and a healthy cluster none.

Tests mpiddp/doctor. `python -m benchmarks.doctor` injects the same faults one by one.
python -m pytest tests/cluster/launch/test_doctor.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support.cluster import Cluster, why_not
from tests.support.doctor_faults import (
    FAULTS,
    NAMES,
    UNTRIED,
    WORK,
    Fault,
    doctor,
    prepared,
    unexplained,
)

UNREACHED = ("wrong key", "unknown host key", "stopped sshd", "unresolvable name")
LACKING = ("interpreter missing", "daemon missing", "host down")
OTHERS = ("working folder missing", "Open MPI 4 beside 5")
# Each of these hides or is hidden by another of them.
ALONE = {
    *("torch does not load", "data of another size", "large packets lost", "slow disk"),
    *("foreign libmpi", "slow processor", "another user of a GPU"),
}


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    with prepared() as standing:
        yield standing


# One host has one core, which another test may use while it is measured.
BUSY = r"speed warn node\d is slow: .* at (8\d|90) % of the others'"
BUSY_LINK = r"bandwidth warn node\d → node\d carries .*, the middle pair "


def require_found(
    hosts: Cluster, faults: list[Fault], *arguments: str, also: tuple[str, ...] = ()
) -> None:
    """With all of these at once, the doctor finds each and nothing else, and ends with code 1.

    Args:
        also: patterns of lines that it may add.
    """
    with ExitStack() as stack:
        for fault in faults:
            stack.enter_context(fault.inject(hosts))
        names = max((fault.names for fault in faults), key=len)
        code, seconds, said = doctor(hosts, *arguments, names=names)
    print(f"{seconds} s", *said, sep="\n")
    missed = {fault.name for fault in faults if len(unexplained(said, [fault.says])) == len(said)}
    assert missed == set(), said
    patterns = [pattern for fault in faults for pattern in (fault.says, *fault.also)]
    assert unexplained(said, [*patterns, *UNTRIED, *also]) == []
    assert code == 1


def test_a_healthy_cluster_has_no_false_alarm(hosts: Cluster) -> None:
    code, _, said = doctor(hosts, "--script", "train.py", "--data", "data")
    assert (code, unexplained(said, [BUSY])) == (0, [])
    for host in hosts.hosts:  # nothing of the doctor stays
        assert host.run(["ls", "-A", f"{WORK}/runs"]).stdout == ""
        assert "mpiddp" not in str(host.processes())


def test_hosts_that_ssh_does_not_reach(hosts: Cluster) -> None:
    """The other host is checked all the same."""
    require_found(hosts, [FAULTS[name] for name in UNREACHED])


@pytest.mark.parametrize("names", [LACKING, OTHERS])
def test_hosts_that_lack_what_a_job_needs(hosts: Cluster, names: tuple[str, ...]) -> None:
    require_found(hosts, [FAULTS[name] for name in names], "--quick")


def test_a_slow_host_is_remembered(hosts: Cluster) -> None:
    """The history beside the hostfile has the figures; the next launch says which host is slow."""
    file = hosts["node0"].path(f"{WORK}/hosts.txt")
    file.write_text("".join(f"{name} slots=1\n" for name in NAMES.split(",")))
    with FAULTS["slow disk"].inject(hosts):
        code, _, said = doctor(hosts, hostfile="hosts.txt")
    says = FAULTS["slow disk"].says
    assert (code, unexplained(said, [says, BUSY, BUSY_LINK])) == (0, [])
    assert len(unexplained(said, [says])) == len(said) - 1
    *_, last = file.with_name("hosts.txt.history.jsonl").read_text().splitlines()
    event = json.loads(last)  # after that of the small job
    assert "disk" in event["slow"]["node2"]
    assert set(event["figures"]) == set(NAMES.split(","))
    assert {"link", "disk", "memory copy"} <= set(event["figures"]["node0"])


def test_faults_everywhere_at_once(hosts: Cluster) -> None:
    """One run with all of them: each has its line, none hides another."""
    left = {*FAULTS} - {*UNREACHED, *LACKING, *OTHERS} - ALONE
    faults = [fault for name, fault in FAULTS.items() if name in left]
    require_found(hosts, faults, "--script", "train.py", "--data", "data", also=(BUSY,))
