"""The hostfile grammar, the command `mpiddp hosts`, and what launches write down beside a hostfile.

Tests mpiddp/hosts/{hostfile,main,history}.py.
"""

import json
import os
import subprocess
import time

import pytest

from mpiddp.hosts import keys
from mpiddp.hosts.history import ENDING, Event, append, doubts, file_of, read, record_of
from mpiddp.hosts.hostfile import (
    Host,
    Hosts,
    diff,
    parse_host_list,
    parse_hostfile,
    render,
)
from tests.support.cluster import needs


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


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


def test_render_each_format():
    hosts = parse("joe@node1 slots=2 max_slots=4\nnode2 slots=0\nnode3 slots=1\n")
    assert render(hosts, "openmpi") == (
        "joe@node1 slots=2 max_slots=4\nnode2 slots=0\nnode3 slots=1\n"
    )
    assert render(hosts, "mpich") == "node1:2 user=joe\nnode3:1\n"
    assert render(hosts, "slurm") == "node1\nnode1\nnode3\n"
    assert parse(render(hosts, "openmpi")) == hosts


def test_gpus_of_a_host():
    """Without slots=, the host has a slot for each. No MPI knows the key, so a conversion comments it."""
    hosts = parse("node1 gpus=0,2,3\nnode2 slots=1 gpus = 1\n")
    assert [(host.slots, host.gpus) for host in hosts.hosts] == [(3, (0, 2, 3)), (1, (1,))]
    assert render(hosts, "openmpi") == (
        "# for mpiddp launch: node1 gpus=0,2,3\nnode1 slots=3\n"
        "# for mpiddp launch: node2 gpus=1\nnode2 slots=1\n"
    )
    assert render(hosts, "mpich").splitlines()[1::2] == ["node1:3", "node2:1"]
    assert render(hosts, "slurm") == "node1\nnode1\nnode1\nnode2\n"
    assert diff(hosts, parse("node1 slots=3 gpus=0,1,2\nnode2 gpus=1\n"))[3:] == [
        "-# for mpiddp launch: node1 gpus=0,2,3",
        "+# for mpiddp launch: node1 gpus=0,1,2",
    ]


def test_a_private_key_without_its_public_half_is_kept(tmp_path, monkeypatch):
    needs.need("ssh-keygen")
    (tmp_path / ".ssh").mkdir()
    key = tmp_path / ".ssh" / "id_ed25519"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", key], check=True)
    private, public = key.read_bytes(), key.with_suffix(".pub").read_text()
    key.with_suffix(".pub").unlink()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert keys._key().read_text().split()[:2] == public.split()[:2]
    assert key.read_bytes() == private


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
