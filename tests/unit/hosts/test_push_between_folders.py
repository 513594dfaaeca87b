"""A push between two folders of this machine, through the real program of each host, without ssh.

Tests mpiddp/hosts/cluster/. tests/cluster/launch/test_hosts_push.py has real hosts.
python -m pytest tests/unit/hosts/test_push_between_folders.py
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from mpiddp.errors import JobFailed, UserError
from mpiddp.hosts.cluster import fan_out, push
from mpiddp.hosts.cluster.connection import START, Failed, Peer
from mpiddp.hosts.cluster.fan_out import Content, FanOut, Target, receiving_program
from mpiddp.hosts.cluster.push import Options, Pushed, read_content
from mpiddp.hosts.cluster.tree import LINK, PATH, Row, digest, list_tree
from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.hosts.transport import QRSH
from mpiddp.launch import main as launch
from mpiddp.launch.options import parse_options
from tests.support import folders_as_hosts
from tests.support.errors import error
from tests.support.folders_as_hosts import HERE, files_of, modes_count, shell, verb, write
from tests.support.patience import PATIENCE_S
from tests.support.ranks import clean_env


@pytest.fixture(name="hosts", autouse=True)
def folders_of_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return folders_as_hosts.stand(tmp_path, monkeypatch)


def ask(names: Sequence[str], **options: bool) -> tuple[Content, list[Target], dict[str, str]]:
    """Targets that were asked for what they lack, and the reasons of those that refuse."""
    content = read_content(Options((HERE,), **options))
    targets = [Target.connect(Host(name)) for name in names]
    refusals: dict[str, str] = {}
    for target in targets:
        try:
            target.ask(content)
        except Failed as failure:
            refusals[target.host.name] = str(failure)
    return content, targets, refusals


def send(names: Sequence[str], **options: bool) -> FanOut:
    content, targets, refusals = ask(names, **options)
    assert refusals == {}
    done = FanOut(content, targets)
    calls: list[int] = []
    done.run(lambda each: calls.append(each.sent))
    assert calls
    for target in targets:
        target.peer.close()
    return done


def refusal(name: str, **options: bool) -> str:
    _, (target,), refusals = ask([name], **options)
    target.peer.close()
    return refusals[name]


# --- what arrives ---


def test_a_push_makes_the_folder_the_same(hosts: Path) -> None:
    write(Path(HERE), train="import torch", lib__a="1" * 5000, lib__deep__b="", runs__log="mine")
    Path(HERE, "lib", "a").chmod(0o755)
    Path(HERE, "link").symlink_to("lib/a")
    done = send(["node1", "node2"])
    assert ([host.name for host in done.done], done.failures) in (
        (["node1", "node2"], {}),
        (["node2", "node1"], {}),
    )
    assert done.is_over
    assert done.sent == 2 * 5012
    for name in ("node1", "node2"):
        there = hosts / name / HERE
        assert files_of(there) == {
            "train": "import torch", "lib/a": "1" * 5000, "lib/deep/b": "", "link": "1" * 5000
        }  # fmt: skip
        assert str((there / "link").readlink()) == "lib/a"
        for path in ("train", "lib/a"):
            mine, theirs = (folder.joinpath(path).stat() for folder in (Path(HERE), there))
            assert (mine.st_mode, mine.st_mtime_ns) == (theirs.st_mode, theirs.st_mtime_ns)
        assert sorted(path.name for path in (there / ".mpiddp-push").iterdir()) == ["copy.json"]


def test_a_second_push_sends_what_has_changed(hosts: Path) -> None:
    write(Path(HERE), stays="1", changes="22", goes="333", lib__stays="4444", lib__changes="5")
    send(["node1"])
    there = hosts / "node1" / HERE
    stays = (there / "stays").stat().st_ino
    write(there, runs__log="of that host")
    (there / "lib" / "__pycache__").mkdir()
    (there / "lib" / "__pycache__" / "a").write_text("compiled there")
    (there / "lib" / "two.history.jsonl").write_text("seen there")
    _, (target,), _ = ask(["node1"])
    assert target.lacks == {}
    target.peer.close()
    write(Path(HERE), changes="66", lib__changes="7777777", new="8")
    Path(HERE, "goes").unlink()
    content, (target,), _ = ask(["node1"])
    assert target.lacks
    assert target.bytes(content) == 2 + 7 + 1
    target.peer.close()
    assert send(["node1"]).sent == 10
    assert files_of(there) == {
        **files_of(Path(HERE)), "runs/log": "of that host",
        "lib/__pycache__/a": "compiled there", "lib/two.history.jsonl": "seen there",
    }  # fmt: skip
    assert (there / "stays").stat().st_ino == stays


def test_what_only_a_host_has_is_not_replaced(hosts: Path) -> None:
    """The job has written an entry of the same name on each host."""
    write(Path(HERE), code="1")
    send(["node1"])
    write(Path(HERE), code="2", outputs__same="same", outputs__a="of this host")
    there = hosts / "node1" / HERE
    write(there, outputs__a="of that host")
    sentence = error("--leave-out", f"{HERE}/outputs ", "(--leave-out outputs)", ": --force")
    assert re.fullmatch(sentence, refusal("node1"))
    assert files_of(there) == {"code": "1", "outputs/a": "of that host"}
    send(["node1"], force=True)
    assert files_of(there) == files_of(Path(HERE))


def test_kinds_of_entries_change_in_place(hosts: Path) -> None:
    """A file becomes a folder, a folder a link, a link a file; folders may not be writable."""
    write(Path(HERE), a="file", b__c="in a folder")
    Path(HERE, "d").symlink_to("a")
    send(["node1"])
    for name in ("a", "d"):
        Path(HERE, name).unlink()
    Path(HERE, "b", "c").unlink()
    Path(HERE, "b").rmdir()
    write(Path(HERE), a__b="now a folder", d="now a file")
    Path(HERE, "b").symlink_to("a")
    Path(HERE, "a").chmod(0o555)
    send(["node1"])
    there = hosts / "node1" / HERE
    assert files_of(there) == files_of(Path(HERE))
    assert (there / "a").stat().st_mode & 0o777 == 0o555
    assert str((there / "b").readlink()) == "a"
    for folder in (there, Path(HERE)):
        (folder / "a").chmod(0o755)


def test_a_push_that_broke_off_continues(hosts: Path) -> None:
    write(Path(HERE), a="1" * 10, b="2" * 20, c="3" * 30)
    content, (target,), _ = ask(["node1"])
    header, rows = content.header, content.rows
    target.peer.ask({"go": True})
    for name in ("a", "b"):
        row = next(row for row in rows[0] if row[0] == name)
        fan_out.transfer.send_file(HERE, row, target.peer.write, lambda count: None)
    target.peer.flush()
    target.peer._in.close()  # the connection ends
    target.peer.process.wait(PATIENCE_S)
    target.peer.close()
    there = hosts / "node1" / HERE
    assert files_of(there) == {}  # nothing has its place yet
    write(Path(HERE), b="4" * 20)
    again, (target,), _ = ask(["node1"])
    assert target.lacks == {0: [1, 2]}
    target.peer.close()
    assert send(["node1"]).sent == 50
    assert files_of(there) == files_of(Path(HERE))
    assert header["trees"][0]["names"] == ["a", "b", "c"]
    assert again.header["trees"][0]["digest"] != header["trees"][0]["digest"]


def test_names_with_ends_of_lines_have_digests_of_their_own() -> None:
    one: list[Row] = [["a", LINK, 0, 0, 0, "t\nb"], ["c", LINK, 0, 0, 0, "u"]]
    other: list[Row] = [["a", LINK, 0, 0, 0, "t"], ["b\nc", LINK, 0, 0, 0, "u"]]
    assert digest(one) != digest(other)


def test_what_a_broken_push_has_left_is_no_part_of_the_next(
    hosts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes_count(hosts, monkeypatch)
    write(Path(HERE), lib__a="1")
    there = hosts / "node1" / HERE
    arrived = there / ".mpiddp-push" / "new" / "lib"
    write(arrived, gone__deep__x="2")
    arrived.chmod(0o555)
    assert send(["node1"]).failures == {}
    assert [path.name for path in (there / "lib").iterdir()] == ["a"]


def test_folders_that_may_not_be_written_change_too(
    hosts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes_count(hosts, monkeypatch)
    there = hosts / "node1" / HERE
    for text in ("before", "after"):
        write(Path(HERE), lib__a=text, z__deep__b=text)
        folders = [top / name for top in (Path(HERE), there) for name in ("lib", "z", "z/deep")]
        for folder in folders[:3]:
            folder.chmod(0o555)
        assert send(["node1"]).failures == {}
        assert files_of(there) == files_of(Path(HERE)) == {"lib/a": text, "z/deep/b": text}
        assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o555}
        for folder in folders[:3]:
            folder.chmod(0o755)
    for folder in folders:
        folder.chmod(0o755)


def test_from_four_hosts_on_those_that_have_it_pass_it_on(
    hosts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fan_out, "LOGIN_BYTES", 1000)
    connected: list[str] = []

    def counted_shell(host: Host, line: str) -> list[str]:
        connected.append(host.name)
        return shell(hosts, host, line)

    monkeypatch.setattr(fan_out, "shell_command", counted_shell)
    write(Path(HERE), a="1" * 1000)
    names = [f"node{index}" for index in range(4)]
    done = send(names)
    assert len(connected) > len(names)
    assert (sorted(host.name for host in done.done), done.failures) == (names, {})
    assert done.sent == 4000
    assert all(files_of(hosts / name / HERE) == files_of(Path(HERE)) for name in names)


def test_a_host_that_no_other_reaches_gets_it_from_here(
    hosts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fan_out, "LOGIN_BYTES", 1)
    write(Path(HERE), a="1" * 100)
    here = str(Path.cwd())

    def from_here_alone(host: Host, line: str) -> list[str]:
        command = shell(hosts, host, line)
        return [*command[:2], f'[ "$PWD" = {shlex.quote(here)} ] || exit 255; {command[2]}']

    monkeypatch.setattr(fan_out, "shell_command", from_here_alone)
    names = [f"node{index}" for index in range(4)]
    done = send(names)
    assert (sorted(host.name for host in done.done), done.failures) == (names, {})
    assert done.sent == 400


def test_hosts_without_ssh_pass_nothing_on(hosts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fan_out, "LOGIN_BYTES", 1)
    write(Path(HERE), a="1" * 100)
    login = Path("login")  # no host's folder has it but this one's
    login.write_text('#!/bin/sh\nexec "$@"\n')
    login.chmod(0o755)
    monkeypatch.setattr(
        fan_out, "shell_command", lambda host, line: ["./login", *shell(hosts, host, line)]
    )
    names = [f"node{index}" for index in range(4)]
    done = send(names)
    assert (sorted(host.name for host in done.done), done.failures) == (names, {})
    assert done.sent == 400


def test_a_copy_that_has_changed_is_not_passed_on(
    hosts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fan_out, "LOGIN_BYTES", 1)
    write(Path(HERE), a="1" * 100)

    def changed(host: Host, line: str) -> list[str]:
        """A host that is asked a second time, to pass its copy on, has another one."""
        return shell(hosts, host, f"{{ test ! -f {HERE}/a || echo 2 > {HERE}/a; }} && {line}")

    monkeypatch.setattr(fan_out, "shell_command", changed)
    names = [f"node{index}" for index in range(4)]
    done = send(names)
    assert (sorted(host.name for host in done.done), done.failures) == (names, {})


# --- what a host refuses ---


def test_a_folder_that_is_no_copy_is_overwritten_by_force_alone(hosts: Path) -> None:
    write(Path(HERE), a="mine")
    write(hosts / "node1" / HERE, a="theirs", z="theirs")
    foreign = error("To overwrite", f"{HERE} ", "(it has a)", ": --force")
    assert re.fullmatch(foreign, refusal("node1"))
    assert files_of(hosts / "node1" / HERE) == {"a": "theirs", "z": "theirs"}
    send(["node1"], force=True)
    assert files_of(hosts / "node1" / HERE) == {"a": "mine", "z": "theirs"}
    record = hosts / "node1" / HERE / ".mpiddp-push" / "copy.json"
    assert json.loads(record.read_text())["names"] == ["a"]
    record.write_text('{"origin": "other:/x", "names": ["a"]}')
    write(Path(HERE), a="changed")
    foreign = error("To overwrite", f"{HERE} ", "other:/x.", ": --force")
    assert re.fullmatch(foreign, refusal("node1"))


def test_a_file_in_the_place_of_the_folder(hosts: Path) -> None:
    write(Path(HERE), a="1")
    write(hosts / "node1", here__project="a file")
    assert re.fullmatch(error("file there", f"{HERE} "), refusal("node1"))


def test_a_host_without_room_is_named_before_anything_is_sent(hosts: Path) -> None:
    with Path(HERE, "large").open("wb") as file:
        file.truncate(1 << 43)
    sentence = error("MB there", f"{HERE} ", " 8796093.0 MB ", " MB ")
    assert re.fullmatch(sentence, refusal("node1"))
    assert not (hosts / "node1" / HERE).exists()


def test_what_the_folder_leads_to_has_to_be_there(hosts: Path) -> None:
    outside = hosts / "interpreter"
    outside.write_text("")
    write(Path(HERE), venv__pyvenv="", lib__site="")
    Path(HERE, "venv", "python").symlink_to(outside)
    content = read_content(Options((HERE,)))
    assert content.header["needs"] == [[str(outside), f"{HERE}/venv/python"]]
    _, (target,), refusals = ask(["node1"])
    assert refusals == {}
    outside.rename(hosts / "moved")
    missing = error("there, push", f"{outside} ", f"{HERE}/venv/python ", "--with-python")
    with pytest.raises(Failed, match=rf"^{missing}$"):
        Target.connect(Host("node2")).ask(content)
    target.peer.close()


def test_a_file_that_becomes_shorter_ends_the_push(hosts: Path) -> None:
    write(Path(HERE), a="1" * 100)
    content, targets, _ = ask(["node1"])
    write(Path(HERE), a="1")
    done = FanOut(content, targets)
    done.run(lambda each: None)
    (failure,) = done.failures.values()
    assert re.fullmatch(error("has become", f"{HERE}/a "), failure)
    assert (done.done, files_of(hosts / "node1" / HERE)) == ([], {})


def test_a_file_that_arrives_damaged_takes_no_place(hosts: Path) -> None:
    """The next push sends it again."""
    write(Path(HERE), a="1", b="2")
    _, (target,), _ = ask(["node1"])
    target.peer.ask({"go": True})
    target.peer.write(b"3" + sha256(b"1").digest())
    target.peer.flush()
    damaged = error("arrived damaged", f"{HERE}/.mpiddp-push/new/a ")
    with pytest.raises(Failed, match=rf"^{damaged}$"):
        target.peer.answer()
    target.peer.close()
    assert files_of(hosts / "node1" / HERE) == {}
    assert send(["node1"]).sent == 2
    assert files_of(hosts / "node1" / HERE) == {"a": "1", "b": "2"}


def test_a_copy_that_changes_while_it_is_pushed(hosts: Path) -> None:
    """A job writes there, into a file that this push leaves as it is."""
    write(Path(HERE), lib__stays="1", lib__changes="2")
    send(["node1"])
    write(Path(HERE), lib__changes="3")
    content, targets, _ = ask(["node1"])
    there = hosts / "node1" / HERE
    write(there, lib__stays="of the job")
    done = FanOut(content, targets)
    done.run(lambda each: None)
    (failure,) = done.failures.values()
    assert re.fullmatch(error("changed there", f"{HERE} "), failure)
    assert files_of(there) == {"lib/stays": "of the job", "lib/changes": "2"}
    assert send(["node1"]).sent == 1
    assert files_of(there) == {"lib/stays": "1", "lib/changes": "3"}


def test_a_file_system_that_keeps_whole_seconds(
    hosts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coarse = (
        "keep = os.utime; os.utime = lambda path, ns: keep(path, tuple(t // 10**9 for t in ns))"
    )

    def shell_there(host: Host, line: str) -> list[str]:
        return shell(hosts, host, line.replace("import sys;", f"import os, sys; {coarse};"))

    monkeypatch.setattr(fan_out, "shell_command", shell_there)
    write(Path(HERE), a="1")
    os.utime(Path(HERE, "a"), ns=(1, 1))
    done = send(["node1"])
    (failure,) = done.failures.values()
    assert re.fullmatch(error("file system", f"{HERE} "), failure)


def test_two_pushes_to_one_folder_at_once(hosts: Path) -> None:
    write(Path(HERE), a="1")
    first, second = ask(["node1"])[1][0].peer, ask(["node1"])[1][0].peer
    first.ask({"go": True})
    lock = hosts / "node1" / HERE / ".mpiddp-push" / "copy.json"
    while not lock.exists():
        assert first.process.poll() is None
    second.ask({"go": True})
    with pytest.raises(Failed, match=rf"^{error('another push', f' {HERE} ')}$"):
        second.answer()
    for peer in (first, second):
        peer.close()


# --- a connection ---


# A host reads all that comes until it is asked: a write to one that has ended would fail sooner.
ASKED = "read -r length; read -r program_and_question"


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (f"{ASKED}; exit 96", error("there. Install", "python3 ")),
        (f"echo mpiddp-push; {ASKED}; echo 'cut off.' >&2; exit 1",
         error("connection was", "(cut off)")),
        (f"echo mpiddp-push; {ASKED}; exit 3", error("connection was", "(exit code 3)")),
        (f"{ASKED}; echo hello; echo mpiddp-push; echo '{{\"failed\": \"too old.\"}}'", r"too old\."),
        (f"{ASKED}; echo 'ssh: connect to host node1 port 22: Connection refused' >&2; exit 255",
         error("connection refused", "ssh node1: ", ": node1 port=N")),
    ],
)  # fmt: skip
def test_a_connection_that_ends_says_why(
    monkeypatch: pytest.MonkeyPatch, command: str, sentence: str
) -> None:
    write(Path(HERE), a="1")
    monkeypatch.setattr(fan_out, "shell_command", lambda host, line: ["sh", "-c", command])
    content = read_content(Options((HERE,)))
    with pytest.raises(Failed, match=rf"^{sentence}$"), fan_out.sentences(Host("node1")):
        Target.connect(Host("node1")).ask(content)


def test_a_login_that_does_not_end(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(Path(HERE), a="1")
    monkeypatch.setattr(fan_out.connection, "LOGIN_S", 0.1)
    command = ["sleep", str(PATIENCE_S)]
    monkeypatch.setattr(fan_out, "shell_command", lambda host, line: command)
    silent = error("no answer in", "node1: ssh node1: ", " 0.1 s", "Try: ssh node1 true")
    for each in ("push", "pull"):
        with pytest.raises(UserError, match=rf"^{silent}$"):
            verb(each, HERE)


def test_a_host_whose_login_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it reads no program, here one that no pipe holds."""
    monkeypatch.setattr(fan_out, "receiving_program", lambda: b"\n" * (1 << 21))
    monkeypatch.setattr(fan_out, "shell_command", lambda host, line: ["false"])
    failed = error("failed:", "ssh node1 ", ": no output", "Try: ssh node1 true")
    with pytest.raises(Failed, match=rf"^{failed}$"):
        Target.connect(Host("node1")).ask(Content({}, []))


@pytest.mark.parametrize("greeting", ["welcome\n", "welcome\nthe title of a window", ""])
def test_what_a_shell_prints_before_is_kept(hosts: Path, greeting: str) -> None:
    line = f"printf %s {shlex.quote(greeting)}; cd {shlex.quote(str(hosts))} && {START}"
    peer = Peer(["timeout", str(PATIENCE_S), "sh", "-c", line], receiving_program())
    peer.ask({"give": "./nothing"})
    assert peer.answer() == {"rows": []}
    assert peer.greeting == greeting.encode()
    peer.close()
    peer.close()


# --- what is pushed ---


def test_what_is_left_out(hosts: Path) -> None:
    write(Path(HERE), a="1", runs__x="2", data__x="3", lib__a="4")
    Path(HERE, "__pycache__").mkdir()
    Path(HERE, ".git").mkdir()
    Path(HERE, "x.history.jsonl").write_text("of this host")
    (tree,) = read_content(Options((HERE,))).header["trees"]
    assert tree["names"] == ["a", "lib", "x.history.jsonl"]
    with_data = read_content(Options((HERE,), left_out=("runs",)))
    assert with_data.header["trees"][0]["names"] == [".git", "a", "data", "lib", "x.history.jsonl"]
    assert [row[0] for row in with_data.rows[0]] == [".git", "a", "data", "data/x", "lib", "lib/a"]


def test_a_folder_in_another_is_pushed_once(hosts: Path) -> None:
    write(Path(HERE), a="1", lib__x__b="22", data__x__c="333")
    folders = (f"{HERE}/lib/x", HERE, f"{HERE}/data/x")
    assert [tree["folder"] for tree in read_content(Options(folders)).header["trees"]] == [
        HERE, f"{HERE}/data/x"
    ]  # fmt: skip
    names = [Host("localhost"), Host("node1")]
    assert push.push(names, Options(folders)).lacked == {names[1]: 6}
    assert push.push(names, Options(folders)).lacked == {names[1]: push.SAME}
    write(Path(HERE), lib__x__b="4444", data__x__c="55555")
    assert push.push(names, Options(folders)).lacked == {names[1]: 9}
    assert files_of(hosts / "node1" / HERE) == files_of(Path(HERE))
    write(hosts, disk__b="6")
    Path(HERE, "lib", "link").symlink_to(hosts / "disk")
    link = error("leads out", f"{HERE}/lib/link ", f" {HERE} ", f": {hosts}/disk ")
    with pytest.raises(UserError, match=rf"^{link}$"):
        read_content(Options((HERE, f"{HERE}/lib/link")))


def test_the_python_of_an_environment_is_pushed_if_asked_for(hosts: Path) -> None:
    python = hosts / "uv" / "bin" / "python3.12"
    write(python.parent, **{"python3.12": ""})
    Path(HERE, "python").symlink_to(python)
    for with_python, folders in ((False, [HERE]), (True, [HERE, str(hosts / "uv")])):
        header = read_content(Options((HERE,), with_python=with_python)).header
        assert [tree["folder"] for tree in header["trees"]] == folders
        assert bool(header["needs"]) != with_python
    assert read_content(Options((HERE,))).header["needs"] != []  # nobody has asked


def test_folders_that_cannot_be_pushed(hosts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(hosts / "here" / "home"))
    (hosts / "disk" / "user").mkdir(parents=True)
    (hosts / "here" / "home").symlink_to(hosts / "disk" / "user")
    for folder, id in {
        str(hosts / "nowhere"): "this host",
        str(hosts / "here"): "or holds",
        str(hosts / "disk"): "or holds",
        HERE: "nothing to push",
    }.items():
        with pytest.raises(UserError, match=rf"^{error(id, f'{folder} ')}$"):
            read_content(Options((folder,)))


READS = """
import sys
from mpiddp.errors import UserError
from mpiddp.hosts.cluster.push import Options, read_content
try:
    read_content(Options((sys.argv[1],)))
except UserError as error:
    print(error)
"""


@pytest.mark.parametrize("closed", [HERE, f"{HERE}/lib"])
def test_a_folder_that_must_not_be_read(hosts: Path, closed: str) -> None:
    write(Path(HERE), a="1", lib__b="2")
    Path(closed).chmod(0)
    limited = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
    done = subprocess.run(
        [*limited, sys.executable, "-c", READS, HERE],
        env=clean_env(), capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    Path(closed).chmod(0o755)
    sentence = error(":", f"{closed}: ", "Permission denied")
    assert re.fullmatch(f"{sentence}\n", done.stdout), done


@pytest.mark.parametrize(
    ("lacked", "sent", "found", "dry_run", "lines"),
    [
        ({}, 0, 0, False, ["there is no other host"]),
        ({"n1": push.SAME, "n2": push.SAME}, 0, 0, False, ["n[1-2]: nothing has changed"]),
        ({"n1": 10, "n2": push.SAME}, 10, 0, False,
         ["n2: nothing has changed", "n1: 10 B sent", "10 B in 2.5 s"]),
        ({"n1": 10}, 10, 8, False,
         ["n1: 10 B sent", "10 B in 2.5 s; rsync found 8 B of it there"]),
        ({"n1": 10}, 0, 0, True, ["n1: 10 B would be sent"]),
    ],
)  # fmt: skip
def test_the_summary_of_a_push(
    lacked: dict[str, int], sent: int, found: int, dry_run: bool, lines: list[str]
) -> None:
    by_host = {Host(name): count for name, count in lacked.items()}
    assert push.summary(Pushed(by_host, {}, sent, found, 2.5), dry_run) == lines


def test_a_push_without_another_host() -> None:
    done = push.push([Host("localhost")], Options((HERE,)))
    assert (done.lacked, done.failures, done.sent) == ({}, {}, 0)
    with pytest.raises(UserError, match=error("--min-hosts", "--min-hosts 2: ", " 1 host ")):
        push.push([Host("localhost")], Options((HERE,), min_hosts=2))


def test_the_result_of_a_push(hosts: Path) -> None:
    """Hosts that refuse or are lost may be fewer than the options allow."""
    write(Path(HERE), a="12345", run="12")
    names = [Host("localhost"), Host("node1"), Host("node2")]
    dry = push.push(names, Options((HERE,), dry_run=True))
    assert (dry.lacked, dry.failures, dry.sent) == ({names[1]: 7, names[2]: 7}, {}, 0)
    assert not (hosts / "node1" / HERE).exists()
    done = push.push(names[:2], Options((HERE,)))
    assert (done.lacked, done.failures, done.sent) == ({names[1]: 7}, {}, 7)
    assert 0 < done.seconds < PATIENCE_S
    write(hosts / "node2" / HERE, foreign="")
    why = error("To overwrite", f"{HERE} ", "(it has foreign)", ": --force")
    with pytest.raises(UserError, match=rf"^node2: {why}$"):
        push.push(names, Options((HERE,)))
    same = push.push(names, Options((HERE,), min_hosts=2))
    assert (same.lacked, list(same.failures), same.sent) == ({names[1]: push.SAME}, [names[2]], 0)
    assert re.fullmatch(why, same.failures[names[2]])
    assert 0 < same.seconds < PATIENCE_S
    forced = push.push(names, Options((HERE,), force=True))
    assert (forced.lacked, forced.sent) == ({names[1]: push.SAME, names[2]: 7}, 7)


def test_a_push_that_too_few_hosts_have_got_is_a_failed_job(
    hosts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(Path(HERE), a="12345")
    there = hosts / "node1" / HERE
    line = f"mkdir -p {there} && ln -s /nowhere {there}/.mpiddp-push"

    def with_a_link(host: Host, command: str) -> list[str]:
        """The host gets something in the place of the private folder."""
        return shell(hosts, host, f"{line}; {command}")

    monkeypatch.setattr(fan_out, "shell_command", with_a_link)
    with pytest.raises(JobFailed, match=r"^node1: .*\.mpiddp-push/new: No such file "):
        push.push([Host("localhost"), Host("node1")], Options((HERE,)))
    few = push.push([Host("localhost"), Host("node1")], Options((HERE,), min_hosts=1))
    assert (few.lacked, list(few.failures), few.exit_code) == ({}, [Host("node1")], 1)


def test_the_verb_push(capfd: pytest.CaptureFixture[str]) -> None:
    write(Path(HERE), a="1")
    assert verb("push", HERE) == 0
    assert capfd.readouterr() == ("node1: nothing has changed\n", "")
    with pytest.raises(UserError, match=error("--min-hosts", "--min-hosts 3: ", " 2 hosts ")):
        verb("push", HERE, "--min-hosts", "3")
    with pytest.raises(UserError, match=error("this host", "/here/project/none ")):
        verb("push", HERE, "--with-data", f"{HERE}/none")


@pytest.mark.parametrize(
    ("file", "options", "is_pushed"),
    [
        ("a", (), True),
        ("a", ("--leave-out", "b", "--leave-out", "a"), False),
        (".git", (), False),
        ("runs", (), False),
        ("data", (), False),
        ("data", ("--include", "runs", "--include", "data"), True),
        ("data", ("--include", "data/"), True),
        ("a", ("--leave-out", "a//"), False),
        (".venv.lock", (), False),
        (".mpiddp-push", ("--include", ".mpiddp-push"), False),
        ("__pycache__", (), False),
    ],
)
def test_which_entries_the_verb_pushes(
    capfd: pytest.CaptureFixture[str], file: str, options: tuple[str, ...], is_pushed: bool
) -> None:
    Path(HERE, file).mkdir()
    if is_pushed:
        assert verb("push", HERE, *options, "--dry-run") == 0
        return
    with pytest.raises(UserError, match=error("nothing to push", "/here/project ")):
        verb("push", HERE, *options, "--dry-run")


@pytest.mark.parametrize("option", ["--include", "--leave-out"])
@pytest.mark.parametrize("name", ["lib/big", "/", ""])
def test_an_entry_is_a_name(option: str, name: str) -> None:
    with pytest.raises(UserError, match=error("--help", f" {option}: ", f"'{name}'")):
        verb("push", HERE, option, name)


def test_hosts_that_the_verb_goes_without(
    hosts: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(Path(HERE), a="1")
    monkeypatch.setattr(
        fan_out, "shell_command", lambda host, line: ["sh", "-c", f"{ASKED}; exit 96"]
    )
    missing = error("there. Install", "node1: python3 ")
    assert verb("push", HERE, "--min-hosts", "1") == 0
    out, err = capfd.readouterr()
    assert out == ""
    assert re.fullmatch(rf"{missing}\n", err)
    for each in ("push", "pull"):
        with pytest.raises(UserError, match=rf"^{missing}$"):
            verb(each, HERE)
    assert verb("pull", HERE, "--min-hosts", "1") == 1
    out, err = capfd.readouterr()
    assert re.fullmatch(rf"{missing}\n", out)
    assert err == ""


def test_a_launch_pushes_this_folder(
    hosts: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment of this Python is inside of it."""
    monkeypatch.setattr(sys, "prefix", HERE)
    write(Path(HERE), a="12345")
    where = parse_options(["-H", "x", "-m", "x"])
    both = Hosts("hosts", (Host("localhost"), Host("node1"), Host("node2", slots=0)))
    launch._push(both, HERE, where)
    assert re.fullmatch(r"mpiddp: node1: 5 B sent; 5 B in \d\.\d s\n", capfd.readouterr().err)
    without_ssh = error("--push needs", "--push ", "ssh", " qrsh -inherit ")
    with pytest.raises(UserError, match=rf"^{without_ssh}$"):
        launch._push(replace(both, transport=QRSH), HERE, where)
    write(hosts / "node2" / HERE, foreign="")
    other = Hosts("hosts", (Host("localhost"), Host("node2")))
    foreign = error("To overwrite", f"node2: {HERE} ", "(it has foreign)", ": --force")
    with pytest.raises(UserError, match=rf"^{foreign}$"):
        launch._push(other, HERE, where)
    for options in (["--spares", "1"], ["--min-hosts", "1"]):
        launch._push(other, HERE, parse_options(["-H", "x", *options, "-m", "x"]))
        err = capfd.readouterr().err
        assert re.match(f"mpiddp: not pushed to {foreign}", err)
        assert err.count("mpiddp:") == 1


def test_a_file_that_vanishes_while_its_folder_is_read_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the files of a job that runs there."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/kept").touch()
    listed = ["kept", "gone"]
    monkeypatch.setattr(os, "listdir", lambda folder: listed)
    assert [row[PATH] for row in list_tree(str(tmp_path), ["logs"])] == [
        "logs",
        "logs/kept",
    ]
