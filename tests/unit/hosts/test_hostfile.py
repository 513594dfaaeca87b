"""The hostfile grammar, its errors, and the command `mpiddp hosts`.

Tests mpiddp/hosts/hostfile.py, mpiddp/hosts/main.py.
python -m pytest tests/unit/hosts/test_hostfile.py
"""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mpiddp.errors import UserError
from mpiddp.hosts import keys, main
from mpiddp.hosts.hostfile import (
    Host,
    Hosts,
    diff,
    parse_host_list,
    parse_hostfile,
    read_hostfile,
    render,
    slots_of,
)
from tests.support.cluster import needs
from tests.support.errors import error
from tests.support.patience import PATIENCE_S

HOSTFILES = Path(__file__).parents[3] / "hostfiles"

EXAMPLE = "node1 slots=4"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def parse(text):
    return parse_hostfile(text.encode(), "hosts.txt")


def refusal(call):
    with pytest.raises(UserError) as caught:
        call()
    return str(caught.value)


# --- valid hostfiles ---


@pytest.mark.parametrize(
    ("line", "host"),
    [
        ("node1", Host("node1")),
        ("node1 slots=4", Host("node1", slots=4)),
        ("node1 slots = 4", Host("node1", slots=4)),
        ("\tnode1\tslots=4 ", Host("node1", slots=4)),
        ("node1 slots=4#fast", Host("node1", slots=4)),
        ("node1 # grün, ohne slots=", Host("node1")),
        ("node1 slots=2 max_slots=4", Host("node1", slots=2, max_slots=4)),
        ("node1 max-slots = 4", Host("node1", max_slots=4)),
        ("node1:2", Host("node1", slots=2)),
        ("node1:2 user=joe", Host("node1", slots=2, user="joe")),
        ("joe@node1 port=2222", Host("node1", user="joe", port=2222)),
        ("joe.b_c-d@node1:3", Host("node1", slots=3, user="joe.b_c-d")),
        ("a_b-c.example.org", Host("a_b-c.example.org")),
        ("10.0.0.7 slots=2", Host("10.0.0.7", slots=2)),
        ("10.0.0.7:2", Host("10.0.0.7", slots=2)),
        ("fe80::1 slots=2", Host("fe80::1", slots=2)),
        ("[::1]:2", Host("::1", slots=2)),
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


def test_comments_and_blank_lines_count_as_lines():
    hosts = parse("# two hosts\n\nnode1 slots=2\n  # more\nnode2\n")
    assert [(host.name, host.line) for host in hosts.hosts] == [("node1", 3), ("node2", 5)]


def test_parse_a_host_list():
    hosts = parse_host_list("h1:2, joe@h2:4,[::1]:1,h3")
    assert hosts == Hosts(
        "-H", (Host("h1", 2), Host("h2", 4, user="joe"), Host("::1", 1), Host("h3"))
    )
    assert hosts.hosts[1].ssh_target == "joe@h2"


def test_sets_of_names():
    """As in Slurm's lists, in -H, in a hostfile's line and in --exclude."""
    hosts = parse_host_list("gpu[07-09,12]:8,me@b[1-2]:1,[fd77::1]:2,login").hosts
    assert [(host.name, host.slots, host.user) for host in hosts] == [
        *((f"gpu{number}", 8, None) for number in ("07", "08", "09", "12")),
        *(("b1", 1, "me"), ("b2", 1, "me"), ("fd77::1", 2, None), ("login", None, None)),
    ]
    hosts = parse_hostfile(b"# all\ngpu[1-2] slots=4 port=2222\ngpu3\n", "hosts").hosts
    assert [(host.name, host.slots, host.port, host.line) for host in hosts] == [
        *(("gpu1", 4, 2222, 2), ("gpu2", 4, 2222, 2), ("gpu3", None, None, 3)),
    ]
    for text, words in (
        ("gpu[1-2:8", "brackets do not match"),
        ("gpu[2-1]", "range such as"),
        ("gpu[1-999999999]", "range such as"),
        ("gpu[1-2],gpu2", "listed twice"),
    ):
        with pytest.raises(UserError, match=words):
            parse_host_list(text)


def test_a_host_is_the_same_wherever_it_is_written():
    first, second = parse("node1 slots=2\n"), parse("# more\nnode1   slots=2 # fast\n")
    assert first.hosts == second.hosts
    assert first == replace(second, source="other")


# --- errors ---


@pytest.mark.parametrize(
    ("text", "id", "values"),
    [
        ("a\nb\nnode1 slots=two\n", "a positive", [':3: "slots=two"', EXAMPLE]),
        ("node1 slots=²", "a positive", [':1: "slots=²"', EXAMPLE]),
        ("node1:", "a positive", [':1: "node1:"', "node1:4"]),
        ("node1 host=b", "not one of", [':1: "host=b"', EXAMPLE]),
        ("node1 slots=9999999", "a positive", [':1: "slots=9999999"', EXAMPLE]),
        ("node1\nno\rde2\n", "not text", [":2: ", "0x0d", EXAMPLE]),
        ("node1\x1b[2J", "not text", [":1: ", "0x1b", EXAMPLE]),
        (b"\x80\x02}q\x00X\x05\x00", "not text", [":1: ", "0x80", EXAMPLE]),
        ("joe@-oProxyCommand=x:2", "of letters", [':1: "-oProxyCommand=x"']),
        ("-l@node1", "of letters", [':1: "-l@node1"']),
        ("n" * 99 + "/", "of letters", [f':1: "{"n" * 57}..."', EXAMPLE]),
        ("::1\n0:0::1", "one slots=", [":2: ::1 ", "line 1"]),
        ("n" * 254, "of letters", [f':1: "{"n" * 57}..."', EXAMPLE]),
        (f"node1:{'9' * 5000}", "a positive", [f':1: "node1:{"9" * 51}..."', "node1:4"]),
        ("a slots=999999\nb slots=1", "all; expected", [": 1000000 slots", "999999"]),
    ],
)
def test_an_error_in_a_hostfile_names_the_line_and_a_fix(text, id, values):
    data = text if isinstance(text, bytes) else text.encode()
    said = refusal(lambda: parse_hostfile(data, "hosts.txt"))
    assert re.fullmatch(rf"hosts\.txt{error(id, *values)}", said)


@pytest.mark.parametrize(
    "data",
    [b"\xef\xbb\xbfnode1 slots=2\n", b"# a\r\nnode1 slots = 2 \r\n", b"\r\nnode1\r\nnode1\r"],
)
def test_windows_line_ends_and_a_byte_order_mark_do_no_harm(data):
    assert parse_hostfile(data, "hosts.txt").hosts == (Host("node1", 2),)


# --- writing ---


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


def test_render_refuses_what_a_format_cannot_express():
    def refused(line, form):
        return refusal(lambda: render(parse(line), form))

    port = ("port=2222", '"Port 2222"', '"Host node1"', "~/.ssh/config")
    assert re.fullmatch(
        error("in ~/.ssh/config", "hosts.txt:1: MPICH", *port),
        refused("node1 slots=2 port=2222", "mpich"),
    )
    ipv6 = error("express the", "hosts.txt:1: MPICH", " ::1.", "/etc/hosts")
    assert re.fullmatch(ipv6, refused("::1 slots=2", "mpich"))
    no_slots = error("count. Write", "hosts.txt:1: node1 ", "Write: node1 slots=N")
    assert re.fullmatch(no_slots, refused("node1", "slurm"))


def test_diff_lists_the_changes():
    a = parse("node1 slots=4\nnode2 slots=2\nnode3\n")
    b = parse_hostfile(b"node2 slots=2\nnode1 slots=2\njoe@node4\n", "new.txt")
    assert diff(a, b) == [
        *("--- hosts.txt", "+++ new.txt"),
        *("@@ -1 +0,0 @@", "-node1 slots=4"),
        *("@@ -3 +2,2 @@", "-node3", "+node1 slots=2", "+joe@node4"),
    ]
    assert diff(a, parse("# same\nnode1:4\nnode2 slots = 2\nnode3")) == []


# --- mpiddp hosts ---


def python(*arguments):
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": str(HOSTFILES.parent)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def test_mpiddp_hosts_imports_only_the_standard_library():
    imported = "{name.partition('.')[0] for name in sys.modules}"
    done = python(
        *("-S", "-c"),
        f"import sys, mpiddp.hosts.main; print(*{imported} - sys.stdlib_module_names)",
    )
    assert set(done.stdout.split()) == {"mpiddp", "__main__"}, done.stderr


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


@pytest.mark.parametrize(("name", "slots"), [("local", 2), ("two_nodes", 4), ("mixed", 7)])
def test_the_hostfiles_of_this_repository(name, slots):
    hosts = read_hostfile(HOSTFILES / name)
    assert sum(slots_of(hosts, host) for host in hosts.hosts) == slots
    assert main.main(["check", str(HOSTFILES / name)]) == 0
