"""The hostfile grammar, the full text of each error, and the command `mpiddp hosts`.

Tests mpiddp/hosts/hostfile.py, mpiddp/hosts/main.py.
python -m pytest tests/unit/hosts/test_hostfile.py
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mpiddp.errors import UserError
from mpiddp.hosts import main
from mpiddp.hosts.formats import Form, diff, render
from mpiddp.hosts.hostfile import (
    Host,
    Hosts,
    granted_hosts,
    parse_host_list,
    parse_hostfile,
    read_hostfile,
)
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT

HOSTFILES = Path(__file__).parents[3] / "hostfiles"

EXAMPLE = "Example: node1 slots=4"
NUMBER = f"is not a positive integer. {EXAMPLE}"
OPTION = 'starts with "-" and would reach ssh as an option. Refused.'
NAME = f'is not a name of letters, digits, ".", "_" and "-". {EXAMPLE}'
KEYS = f"is not one of slots=, max_slots=, gpus=, port= and user=. {EXAMPLE}"
SHORT = "Use IP addresses, or --keep-fqdn."
LIST = "Example: -H node1:2,node2:4"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def parse(text: str, *, keep_fqdn: bool = False) -> Hosts:
    return parse_hostfile(text.encode(), "hosts.txt", keep_fqdn=keep_fqdn)


def refusal(call: Callable[[], object]) -> str:
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
def test_parse_a_valid_line(line: str, host: Host) -> None:
    assert parse(line).hosts == (host,)


def test_comments_and_blank_lines_count_as_lines() -> None:
    hosts = parse("# two hosts\n\nnode1 slots=2\n  # more\nnode2\n")
    assert [(host.name, host.line) for host in hosts.hosts] == [("node1", 3), ("node2", 5)]
    assert [host.name for host in hosts.without_slots] == ["node2"]


def test_parse_a_host_list() -> None:
    hosts = parse_host_list("h1:2, joe@h2:4,[::1]:1,h3")
    assert hosts == Hosts(
        "-H", (Host("h1", 2), Host("h2", 4, user="joe"), Host("::1", 1), Host("h3"))
    )
    assert hosts.hosts[1].ssh_target == "joe@h2"


def test_a_host_is_the_same_wherever_it_is_written() -> None:
    first, second = parse("node1 slots=2\n"), parse("# more\nnode1   slots=2 # fast\n")
    assert first.hosts == second.hosts
    assert first == replace(second, source="other")
    assert "fast" not in repr(second)


def test_keep_fqdn_allows_names_with_the_same_short_form(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a.x.org\na.y.org\n")
    assert len(read_hostfile(tmp_path / "hosts", keep_fqdn=True).hosts) == 2
    with pytest.raises(UserError, match=r"a\.x\.org and a\.y\.org both shorten to"):
        read_hostfile(tmp_path / "hosts")
    assert len(granted_hosts([["a.x.org"], ["a.y.org"]], "a list").hosts) == 2
    assert len(parse("a.x.org\na.y.org\n", keep_fqdn=True).hosts) == 2
    assert len(parse_host_list("a.x.org,a.y.org").hosts) == 2


def test_ip_addresses_are_not_shortened() -> None:
    assert len(parse("10.0.0.1\n10.0.0.2\n").hosts) == 2


# --- errors ---


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\nb\nnode1 slots=two\n", f':3: "slots=two" {NUMBER}'),
        ("node1 slots=-1", f':1: "slots=-1" {NUMBER}'),
        ("node1 slots=", f':1: "slots=" {NUMBER}'),
        ("node1 slots=2.5", f':1: "slots=2.5" {NUMBER}'),
        ("node1 slots=²", f':1: "slots=²" {NUMBER}'),
        ("node1 port=ssh", f':1: "port=ssh" {NUMBER}'),
        ("node1:two", ':1: "node1:two" is not a positive integer. Example: node1:4'),
        ("node1:", ':1: "node1:" is not a positive integer. Example: node1:4'),
        ("node1 slots=9999999", f':1: "slots=9999999" has more than 6 digits. {EXAMPLE}'),
        ("node1\nno\rde2\n", f":2: byte 0x0d is not text. {EXAMPLE}"),
        ("node1\x1b[2J", f":1: byte 0x1b is not text. {EXAMPLE}"),
        (b"\x80\x02}q\x00X\x05\x00", f":1: byte 0x80 is not text. {EXAMPLE}"),
        (b"node1\nPK\x03\x04", f":2: byte 0x03 is not text. {EXAMPLE}"),
        (b"#" * (5 << 20), f" is larger than 4 MiB: not a hostfile. {EXAMPLE}"),
        ("a\n-oProxyCommand=x\n", f':2: host "-oProxyCommand=x" {OPTION}'),
        ("joe@-oProxyCommand=x:2", f':1: host "-oProxyCommand=x" {OPTION}'),
        ("-l@node1", f':1: user "-l" {OPTION}'),
        ("node1 user=-oProxyCommand=x", f':1: user "-oProxyCommand=x" {OPTION}'),
        ("@node1", f':1: user "" {NAME}'),
        ("_node1", f':1: host "_node1" {NAME}'),
        ("node$(id)", f':1: host "node$(id)" {NAME}'),
        ("node1\u00a0slots=2", rf':1: host "node1\xa0slots=2" {NAME}'),
        ("fe80::1%eth0", f':1: host "fe80::1%eth0" {NAME}'),
        ("n" * 99 + "/", f':1: host "{"n" * 57}..." {NAME}'),
        ("10.0.0.300", f':1: "10.0.0.300" is not an IP address. {EXAMPLE}'),
        ("node1\n12 slots=2", f':2: "12" is not an IP address. {EXAMPLE}'),
        ("::1::2", f':1: "::1::2" is not an IP address. {EXAMPLE}'),
        ("node1 cores=4", f':1: "cores=4" {KEYS}'),
        ("node1 node2", f':1: "node2" {KEYS}'),
        ("node1:2 slots=3", ':1: "slots=3" sets slots twice. Remove one.'),
        ("joe@node1 user=jim", ':1: "user=jim" sets user twice. Remove one.'),
        (
            "node1 slots=4 max_slots=2",
            ":1: max_slots=2 is less than slots=4. Raise it, or write: node1 slots=2",
        ),
        ("node1 port=0", ":1: port=0 is not a port. Expected 1 to 65535."),
        ("node1 port=65536", ":1: port=65536 is not a port. Expected 1 to 65535."),
        (
            "\nnode1 slots=2\nnode2\nNode1 slots=2",
            ":4: Node1 is already on line 2. Merge them into one slots= line.",
        ),
        ("::1\n0:0::1", ":2: ::1 is already on line 1. Merge them into one slots= line."),
        ("a.x.org\na.y.org\n", f': a.x.org and a.y.org both shorten to "a". {SHORT}'),
        ("a.x.org\na\n", f': a.x.org and a both shorten to "a". {SHORT}'),
        ("n" * 254, f':1: host "{"n" * 57}..." has more than 253 characters. {EXAMPLE}'),
        (
            f"node1:{'9' * 5000}",
            f':1: "node1:{"9" * 51}..." has more than 6 digits. Example: node1:4',
        ),
        ("a slots=999999\nb slots=1", ": 1000000 slots in all; expected at most 999999."),
        ("", f" lists no host. {EXAMPLE}"),
        ("# node1\n\n", f" lists no host. {EXAMPLE}"),
        ("node1 slots=0", f": every host has slots=0, so no rank can start. {EXAMPLE}"),
    ],
)
def test_an_error_in_a_hostfile_names_the_line_and_a_fix(text: str | bytes, message: str) -> None:
    data = text if isinstance(text, bytes) else text.encode()
    assert refusal(lambda: parse_hostfile(data, "hosts.txt")) == f"hosts.txt{message}"


@pytest.mark.parametrize("unit", [":", "[:", " ", "=", "a ", "0.", "@"])
def test_a_long_line_is_refused_in_a_short_time(unit: str) -> None:
    """The time of a parser that tries each character as a start grows with the square of the length."""
    began = time.process_time()
    refusal(lambda: parse_hostfile(b"a/" + unit.encode() * 200_000 + b"/", "hosts.txt"))
    refusal(lambda: parse_hostfile(unit.encode() * 200_000 + b"/", "hosts.txt"))
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", f"-H lists no host. {LIST}"),
        ("h1,,h2", f'-H: "" is not a host. {LIST}'),
        ("h1 slots=2", f'-H: "h1 slots=2" is not a host. {LIST}'),
        ("h1:two", '-H: "h1:two" is not a positive integer. Example: node1:4'),
        ("h1:2,h1", "-H: h1 is listed twice. Write it once: h1:N"),
        ("-oProxyCommand=x", f'-H: host "-oProxyCommand=x" {OPTION}'),
    ],
)
def test_an_error_in_a_host_list(text: str, message: str) -> None:
    assert refusal(lambda: parse_host_list(text)) == message


def test_a_missing_hostfile_does_not_fall_back_to_this_machine(folder: Path) -> None:
    missing = "not found (looked in {}). Not falling back to this machine."
    assert refusal(lambda: read_hostfile("hosts.txt")) == f"hosts.txt {missing.format(folder)}"
    assert refusal(lambda: read_hostfile("/no/hosts")) == (
        "/no/hosts not found. Not falling back to this machine."
    )


def test_a_directory_instead_of_a_hostfile(folder: Path) -> None:
    (folder / "hosts").mkdir()
    message = "hosts is a directory. Name a hostfile in it."
    assert refusal(lambda: read_hostfile("hosts")) == message


def test_a_hostfile_without_read_permission() -> None:
    Path("hosts.txt").touch(mode=0)
    root = os.geteuid() == 0
    if root:  # root may read everything, so become another user for this call
        os.seteuid(65534)
    try:
        message = refusal(lambda: read_hostfile("hosts.txt"))
    finally:
        if root:
            os.seteuid(0)
    assert message == "hosts.txt cannot be read: permission denied. Run: chmod u+r hosts.txt"


def test_a_hostfile_that_is_a_symlink_loop(folder: Path) -> None:
    (folder / "loop").symlink_to("loop")
    message = "loop cannot be read: Too many levels of symbolic links."
    assert refusal(lambda: read_hostfile("loop")) == message


@pytest.mark.parametrize(
    "data",
    [b"\xef\xbb\xbfnode1 slots=2\n", b"# a\r\nnode1 slots = 2 \r\n", b"\r\nnode1\r\nnode1\r"],
)
def test_windows_line_ends_and_a_byte_order_mark_do_no_harm(data: bytes) -> None:
    assert parse_hostfile(data, "hosts.txt").hosts == (Host("node1", 2),)


def test_check_finds_line_ends_that_an_mpirun_cannot_parse() -> None:
    Path("my hosts; rm x").write_bytes(b"node1\r\n")
    assert main.main(["check", "my hosts; rm x"]) == 0
    message = refusal(lambda: main.main(["check", "my hosts; rm x", "--mpi", "openmpi"]))
    assert message == (
        "my hosts; rm x:1: Windows line endings, which Open MPI's mpirun cannot parse. "
        r"Run: sed -i 's/\r$//' 'my hosts; rm x'"
    )
    subprocess.run(["bash", "-c", message.partition("Run: ")[2]], check=True, timeout=PATIENCE_S)
    assert main.main(["check", "my hosts; rm x", "--mpi", "openmpi"]) == 0


# --- writing ---


def test_render_each_format() -> None:
    hosts = parse("joe@node1 slots=2 max_slots=4\nnode2 slots=0\nnode3 slots=1\n")
    assert render(hosts, "openmpi") == (
        "joe@node1 slots=2 max_slots=4\nnode2 slots=0\nnode3 slots=1\n"
    )
    assert render(hosts, "mpich") == "node1:2 user=joe\nnode3:1\n"
    assert render(hosts, "slurm") == "node1\nnode1\nnode3\n"


def test_gpus_of_a_host() -> None:
    """Without slots=, the host has a slot for each. No MPI knows the key, so a conversion comments it."""
    hosts = parse("node1 gpus=0,2,3\nnode2 slots=1 gpus = 1\n")
    assert [(host.slots, host.gpus) for host in hosts.hosts] == [(3, (0, 2, 3)), (1, (1,))]
    assert render(hosts, "openmpi") == (
        "# for mpiddp launch: node1 gpus=0,2,3\nnode1 slots=3\n"
        "# for mpiddp launch: node2 gpus=1\nnode2 slots=1\n"
    )
    assert render(hosts, "mpich").splitlines()[1::2] == ["node1:3", "node2:1"]
    assert render(hosts, "slurm") == "node1\nnode1\nnode1\nnode2\n"
    assert diff(hosts, parse("node1 slots=3 gpus=0,1,2\nnode2 gpus=1\n")) == [
        "node1 slots=3 gpus=0,2,3 -> node1 slots=3 gpus=0,1,2"
    ]
    assert "GPUs 0, 2, 3" in main.table(hosts)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("node1 gpus=", "is not a list of GPU numbers. Example: node1 gpus=0,2,3"),
        ("node1 gpus=0,x", "is not a list of GPU numbers. Example: node1 gpus=0,2,3"),
        ("node1 gpus=-1", "is not a list of GPU numbers. Example: node1 gpus=0,2,3"),
        ("node1 gpus=0,0", '"gpus=0,0" names a GPU twice. Remove one.'),
        ("node1 gpus=0 gpus=1", '"gpus=1" sets gpus twice. Remove one.'),
    ],
)
def test_gpus_that_are_no_list_of_numbers(line: str, sentence: str) -> None:
    assert sentence in refusal(lambda: parse(line))


def test_render_refuses_what_a_format_cannot_express() -> None:
    def refused(line: str, form: Form) -> str:
        return refusal(lambda: render(parse(line), form))

    assert refused("node1 slots=2 port=2222", "mpich") == (
        "hosts.txt:1: MPICH's hostfile format cannot express port=2222. "
        'Put "Port 2222" under "Host node1" in ~/.ssh/config.'
    )
    assert refused("::1 slots=2", "mpich") == (
        "hosts.txt:1: MPICH's hostfile format cannot express the IPv6 address ::1. "
        "Give it a name in /etc/hosts, or use IPv4."
    )
    assert refused("node1", "slurm") == (
        "hosts.txt:1: node1 has no slot count. Write: node1 slots=N"
    )


def random_hosts(rng: random.Random, form: Form) -> Hosts:
    """1 to 6 hosts that `form` can express."""
    openmpi = form == "openmpi"
    names = ["node1", "n-2.example.org", "10.0.0.7", "X_3", "4u", *(["fe80::7"] if openmpi else [])]

    def host(name: str) -> Host:
        slots = rng.choice([None, 1, 2, 64])
        return Host(
            name,
            slots,
            rng.choice([None, 64]) if openmpi else None,
            rng.choice([None, "joe", "a.b-c"]),
            rng.choice([None, 22, 65535]) if openmpi else None,
        )

    return Hosts("random", tuple(map(host, rng.sample(names, rng.randint(1, len(names))))))


@pytest.mark.parametrize("form", ["openmpi", "mpich"])
def test_render_and_parse_round_trip(form: Form) -> None:
    rng = random.Random(0)
    for _ in range(300):
        hosts = random_hosts(rng, form)
        assert parse(render(hosts, form)) == hosts


def test_fuzzed_bytes_are_parsed_or_refused() -> None:
    """Parsed hosts survive a round trip, and ssh cannot mistake a name for an option."""
    rng = random.Random(0)
    pieces = [
        *(b"node1", b"n2", b"a.x.org", b"10.0.0.1", b"[::1]", b"fe80::1", b"joe@", b"-oX=y"),
        *(b":", b":2", b" slots", b"=", b" = ", b"3", b"-1", b" max-slots=4", b" port=22", b"user"),
        *(b"\n", b"\r\n", b" ", b"\t", b"#", b"\xef\xbb\xbf", b"\x00", b"\xff", b"\xc2\xa0", b"%"),
    ]
    parsed = 0
    for number in range(6000):
        if number % 3:
            data = b"".join(rng.choices(pieces, k=rng.randint(0, 9)))
        else:
            data = rng.randbytes(rng.randint(0, 40))
        try:
            hosts = parse_hostfile(data, "hosts.txt")
        except UserError:
            continue
        parsed += 1
        assert parse(render(hosts, "openmpi")) == hosts
        for host in hosts.hosts:
            assert host.ssh_target[0] != "-"
            assert host.name[0] != "-"
            assert host.ssh_target.isascii()
            assert not set(host.ssh_target) & set(" \t\n;$'\"\\%=")
    assert parsed > 100, "the fuzzer should produce valid files too"


def test_diff_lists_the_changes() -> None:
    a = parse("node1 slots=4\nnode2 slots=2\nnode3\n")
    b = parse_hostfile(b"node2 slots=2\nnode1 slots=2\njoe@node4\n", "new.txt")
    assert diff(a, b) == [
        "node3: only in hosts.txt",
        "node4: only in new.txt",
        "node1 slots=4 -> node1 slots=2",
        "order: node1, node2 -> node2, node1",
    ]
    assert diff(a, parse("# same\nnode1:4\nnode2 slots = 2\nnode3")) == []


# --- mpiddp hosts ---


def test_check_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    Path("hosts.txt").write_text("node1 slots=4\njoe@10.0.0.7 slots=2 port=2222\n")
    assert main.main(["check", "hosts.txt"]) == 0
    assert capsys.readouterr().out == (
        "host       slots  user  port\n"
        "node1          4  -     -\n"
        "10.0.0.7       2  joe   2222\n"
        "2 hosts, 6 slots\n"
    )


def test_check_marks_hosts_without_a_slot_count(capsys: pytest.CaptureFixture[str]) -> None:
    Path("hosts.txt").write_text("node1:1\nnode2\n")
    assert main.main(["check", "hosts.txt"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "node2    GPUs  -     -",
        "2 hosts, 1 slot, and one per GPU of node2 (1 on a CPU host)",
    ]


@pytest.mark.parametrize(
    ("line", "mpi", "message"),
    [
        ("node1:2", "openmpi", '"node1:2" is MPICH\'s {} Open MPI. Write: node1 slots=2'),
        ("[::1]:2", "openmpi", '"[::1]:2" is MPICH\'s {} Open MPI. Write: ::1 slots=2'),
        ("node1 user=joe", "openmpi", '"user=joe" is MPICH\'s {} Open MPI. Write: joe@node1'),
        ("node1 slots=2", "mpich", '"slots=2" is Open MPI\'s {} MPICH. Write: node1:2'),
        ("node1 slots=2", "intelmpi", '"slots=2" is Open MPI\'s {} Intel MPI. Write: node1:2'),
        (
            "node1:2 # fast",
            "mpich",
            "a comment after a host, which MPICH cannot parse. Give it a line of its own.",
        ),
        (
            "node1 gpus=0,2",
            "openmpi",
            "gpus= is read by mpiddp launch alone, and Open MPI's mpirun has no key for it. "
            "Write: node1 slots=2",
        ),
        (
            "node1 gpus=0,2",
            "mpich",
            "gpus= is read by mpiddp launch alone, and MPICH's mpirun has no key for it. Write: node1:2",
        ),
        ("node1:0", "mpich", "MPICH's hostfile format cannot express slots=0. Remove node1."),
    ],
)
def test_check_for_one_mpi(line: str, mpi: str, message: str) -> None:
    Path("hosts.txt").write_text(f"node0\n{line}\n")
    assert main.main(["check", "hosts.txt"]) == 0
    assert refusal(
        lambda: main.main(["check", "hosts.txt", "--mpi", mpi])
    ) == "hosts.txt:2: " + message.format("syntax and mpirun here is")


@pytest.mark.parametrize(
    ("text", "mpi"),
    [
        ("joe@node1 slots = 2 port=22 # fast\n0:0::1 slots=0\n", "openmpi"),
        ("# fast\nnode1:2 user=joe\nnode2\n", "mpich"),
        ("node1:2 # fast\n", "intelmpi"),
    ],
)
def test_check_accepts_the_syntax_of_each_mpi(text: str, mpi: str) -> None:
    Path("hosts.txt").write_text(text)
    assert main.main(["check", "hosts.txt", "--mpi", mpi]) == 0


def test_convert_prints_the_other_format(capsys: pytest.CaptureFixture[str]) -> None:
    Path("hosts.txt").write_text("node1 slots=4\nnode2\n")
    assert main.main(["convert", "hosts.txt", "--to", "mpich"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "node1:4\nnode2\n"
    assert printed.err == (
        "note: hosts.txt:2: node2 has no slot count. mpiddp launch starts one rank per GPU, "
        "Open MPI's mpirun one per core, MPICH's one per host.\n"
    )


def test_diff_is_0_for_the_same_hosts_and_1_for_others(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a").write_text("node1 slots=4\n")
    Path("b").write_text("node1:4 # the same\n")
    Path("c").write_text("node1 slots=2\n")
    assert main.main(["diff", "a", "b"]) == 0
    assert capsys.readouterr().out == ""
    assert main.main(["diff", "a", "c"]) == 1
    assert capsys.readouterr().out == "node1 slots=4 -> node1 slots=2\n"


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": str(HOSTFILES.parent)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def test_an_error_of_the_command_is_one_sentence_and_exit_code_2() -> None:
    Path("hosts.txt").write_text("node1 slots=two\n")
    done = python("-m", "mpiddp", "hosts", "check", "hosts.txt")
    message = f'hosts.txt:1: "slots=two" {NUMBER}\n'
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_one_sentence(unbuffered: str) -> None:
    Path("hosts").write_text("node1:1\n")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "mpiddp", "hosts", "convert", "hosts", "--to", "mpich"],
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE_S,
        )
    sentence = "mpiddp hosts: its output cannot be written (No space left on device).\n"
    assert (done.returncode, done.stderr) == (1, sentence)


def test_mpiddp_hosts_imports_only_the_standard_library() -> None:
    imported = "{name.partition('.')[0] for name in sys.modules}"
    done = python(
        *("-S", "-c"),
        f"import sys, mpiddp.hosts.main; print(*{imported} - sys.stdlib_module_names)",
    )
    assert set(done.stdout.split()) == {"mpiddp", "__main__"}, done.stderr


@pytest.mark.parametrize(("name", "slots"), [("local", 2), ("two_nodes", 4), ("mixed", 7)])
def test_the_hostfiles_of_this_repository(name: str, slots: int) -> None:
    hosts = read_hostfile(HOSTFILES / name)
    assert hosts.total_slots == slots
    assert main.main(["check", str(HOSTFILES / name), "--mpi", "openmpi"]) == 0


def test_names_with_the_same_short_form_need_an_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hosts").write_text("a.x.org slots=1\na.y.org slots=1\n")
    with pytest.raises(UserError, match="--keep-fqdn"):
        main.main(["check", str(tmp_path / "hosts")])
    assert main.main(["check", "--keep-fqdn", str(tmp_path / "hosts")]) == 0
    assert "2 hosts, 2 slots" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [["check", "--keep", "f"], ["push", "f", "--dry"], ["convert", "f", "--t", "slurm"]],
)
def test_an_option_is_written_out(arguments: list[str]) -> None:
    with pytest.raises((UserError, SystemExit)) as raised:
        main.main(arguments)
    assert "not found" not in str(raised.value)
