"""`mpiddp doctor` on real hosts: each fault has its line, and a healthy cluster none.

Tests mpiddp/doctor.
python -m pytest tests/cluster/launch/test_doctor.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support import cluster
from tests.support.cluster import Cluster, why_not
from tests.support.doctor_faults import (
    FAULTS,
    UNTRIED,
    WORK,
    Fault,
    doctor,
    prepared,
    unexplained,
)
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT

UNREACHED = ("wrong key", "unknown host key", "stopped sshd", "unresolvable name")
LACKING = ("interpreter missing", "daemon missing", "host down")
OTHERS = ("working folder missing", "Open MPI 4 beside 5")
# Each of these hides or is hidden by another of them.
ALONE = {
    *("torch does not load", "large packets lost", "foreign libmpi", "another user of a GPU"),
}


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    with prepared() as standing:
        yield standing


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
    assert (code, said) == (0, [])
    for host in hosts.hosts:  # nothing of the doctor stays
        assert host.run(["ls", "-A", f"{WORK}/runs"]).stdout == ""
        assert "mpiddp" not in str(host.processes())


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_no_false_alarm_on_any_number_of_hosts(count: int) -> None:
    """With three hosts, the small job once hung in a group of two of them."""
    with cluster.up_or_skip(count) as standing:
        names = ",".join(host.name for host in standing.hosts)
        command = [sys.executable, "-m", "mpiddp", "doctor", "-H", names]
        done = standing["node0"].run(command, cwd=ROOT, timeout_s=2 * PATIENCE_S)
        print(done.stdout)
        words = [line.split()[0] for line in done.stdout.splitlines()[1:]]
        assert (done.returncode, {*words} - {"unknown"}) == (0, {"ok"})


def test_hosts_that_ssh_does_not_reach(hosts: Cluster) -> None:
    """The other host is checked all the same."""
    require_found(hosts, [FAULTS[name] for name in UNREACHED])


@pytest.mark.parametrize("names", [LACKING, OTHERS])
def test_hosts_that_lack_what_a_job_needs(hosts: Cluster, names: tuple[str, ...]) -> None:
    require_found(hosts, [FAULTS[name] for name in names], "--quick")


def test_faults_everywhere_at_once(hosts: Cluster) -> None:
    """One run with all of them: each has its line, none hides another."""
    left = {*FAULTS} - {*UNREACHED, *LACKING, *OTHERS} - ALONE
    faults = [fault for name, fault in FAULTS.items() if name in left]
    require_found(hosts, faults, "--script", "train.py", "--data", "data")
