"""What launches write down of their hosts: whole lines beside the hostfile, and never an error.

Tests mpiddp/hosts/history.py.
"""

import json
import os
import time

import pytest

from mpiddp.hosts.history import ENDING, Event, append, doubts, file_of, read, record_of
from mpiddp.hosts.hostfile import Host

NOW = time.time() - 1000
DAY_S = 86400.0


def job(number, *, failed="", hosts=("a", "b"), age_s=0.0):
    """The end of a job, "a" to say that host a ended it."""
    ends = {host: "killed." if host == failed else "" for host in hosts}
    return Event(NOW - age_s + number, f"job{number}", ends)


def silent(number, host):
    return Event(NOW + number, f"job{number}", {host: "ssh: no answer."})


@pytest.fixture
def hostfile(tmp_path):
    path = tmp_path / "hosts.txt"
    path.write_text("a slots=1\nb slots=1\n")
    return path


@pytest.mark.parametrize(
    ("events", "expected", "doubt"),
    [
        ([job(1), job(2)], (2, 0), ""),
        ([job(1, failed="a"), job(2)], (2, 1), ""),
        ([job(1, failed="b"), job(2, failed="b")], (2, 0), ""),
        ([job(n, failed="a") for n in range(1, 4)] + [job(n) for n in range(4, 7)], (5, 2),
         "failed in 2 of its last 5 jobs"),
        ([silent(1, "a"), silent(2, "a"), job(3)], (3, 2), "failed in 2 of its last 3 jobs"),
        # The attempts of one launch are one job, and its worst attempt counts.
        ([job(1, failed="a"), job(1, failed="a"), silent(1, "a"), job(1)], (1, 1), ""),
        ([silent(1, "a"), job(1, hosts=["b"]), job(1)], (1, 1), ""),
    ],
)  # fmt: skip
def test_the_last_jobs_of_a_host_count(events, expected, doubt, hostfile):
    assert record_of("a", events)[:2] == expected
    path = file_of(str(hostfile))
    for event in events:
        append(path, event)
    assert doubts(path, [Host("a")]) == ({"a": f"a {doubt}"} if doubt else {})


def test_an_event_is_one_line_beside_the_hostfile(hostfile):
    event, path = job(1, failed="a"), file_of(str(hostfile))
    assert path == hostfile.with_name(f"hosts.txt{ENDING}")
    append(path, event)
    assert json.loads(path.read_text()) == {
        "at": round(event.at, 3),
        "job": "job1",
        "hosts": {"a": "killed.", "b": ""},
    }
    append(path, job(2))
    append(path, job(3, age_s=31 * DAY_S))  # too old to count
    with path.open("a") as lines:
        lines.write('no line\n{"at": 1}\n{"at": 1, "job": "", "hosts": [1]}\n[]\n')
        lines.write('{"at": 1e300, "job": "no time", "hosts": {}}\n')
    assert [each.job for each in read(path)] == ["job1", "job2"]


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_file_that_is_none_of_ours_is_left_alone(hostfile, kind):
    """A stranger may have put it there, in a folder that all may write."""
    beside, other = hostfile.with_name(f"hosts.txt{ENDING}"), hostfile.with_name("other")
    make = {"link": lambda: beside.symlink_to(other), "pipe": lambda: os.mkfifo(beside)}
    other.write_text("mine\n")
    make.get(kind, beside.mkdir)()
    assert file_of(str(hostfile)) is None
