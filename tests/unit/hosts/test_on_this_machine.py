"""Programs on hosts, where each host is this machine: no ssh is between.

Tests mpiddp/hosts/{ssh,processes,fabric}.py, cluster/{run,keys}.py, and mpiddp/launch/{preflight,orphans}.py.
python -m pytest tests/unit/hosts/test_on_this_machine.py
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpiddp.errors import UserError
from mpiddp.hosts import fabric, main
from mpiddp.hosts.cluster import keys, run_agent
from mpiddp.hosts.cluster.run import _outcome
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.interfaces import Interface, interfaces
from mpiddp.hosts.processes import descendants, end_all, processor_time, signal_all
from mpiddp.hosts.ssh import NO_PROGRAM, Answer, run_on_hosts, shell_command
from mpiddp.hosts.transport import QRSH, Transport
from mpiddp.launch.orphans import kill_orphans
from mpiddp.launch.preflight import Needs, preflight
from tests.support.errors import error
from tests.support.patience import PATIENCE_S

HERE = Host("localhost")
# A transport whose hosts are all this machine: the shell gets the host's name as $0, and the line as $1.
SHELL = Transport("shell", ("sh", "-c", 'eval "$1"'), "rsh", instead="--hostfile FILE")


@pytest.fixture(autouse=True)
def python3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")


# --- one program on all hosts ---


def test_each_host_answers_for_itself() -> None:
    hosts = [Host(f"node{index}.invalid") for index in range(3)]
    program = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    answers = run_on_hosts(hosts, sys.executable, program, timeout_s=60, transport=SHELL)
    assert answers == dict.fromkeys(hosts, Answer(3, "out\n", "err\n"))
    one = run_on_hosts(
        hosts, sys.executable, program, timeout_s=60, transport=SHELL, most_at_once=1
    )
    assert list(one) == hosts
    missing = run_on_hosts([HERE], "/no/such/program", "", timeout_s=60)[HERE]
    assert (missing.exit_code, missing.stdout) == (NO_PROGRAM, "")


@pytest.mark.parametrize(
    ("host", "transport", "command"),
    [
        (Host("localhost", user="me", port=9), None, ["sh", "-c", "true"]),
        (Host("far.invalid"), QRSH, ["qrsh", "-inherit", "far.invalid", "exec sh -c true"]),
    ],
)
def test_the_command_for_a_host(
    host: Host, transport: Transport | None, command: list[str]
) -> None:
    options = {} if transport is None else {"transport": transport}
    assert shell_command(host, "true", **options) == command


def test_a_transport_that_is_not_installed() -> None:
    absent = Transport("absent", ("absent-program",), "rsh", instead="--hostfile FILE")
    missing = error("PATH. Put", "absent-program ", "PATH", ": --hostfile FILE ")
    with pytest.raises(UserError, match=rf"^{missing}$"):
        run_on_hosts([Host("far.invalid")], "true", "", timeout_s=1, transport=absent)
    assert run_on_hosts([HERE], "true", "", timeout_s=60, transport=absent)[HERE].exit_code == 0


# --- the preflight ---


def needs(here: Path, **more: str) -> Needs:
    mpirun = here / "mpirun"
    mpirun.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 5.0.11'\necho more\n")
    mpirun.chmod(0o755)
    paths = {"python": sys.executable, "mpirun": str(mpirun), "daemon": str(mpirun)}
    return Needs(**{**paths, "folder": str(here), "path": "/bin:/usr/bin", **more})


def test_a_host_says_what_it_has(tmp_path: Path) -> None:
    a, b = Host("a.invalid"), Host("b.invalid")
    infos, complaints, silent = preflight([a, b], needs(tmp_path), SHELL)
    assert (list(infos), complaints, silent) == ([a, b], {}, {})
    assert infos[a].host == a
    assert infos[a].mpirun == "mpirun (Open MPI) 5.0.11"
    assert (infos[a].has_folder, infos[a].has_daemon, infos[a].has_program) == (True, True, True)
    assert infos[b].interfaces == tuple(interfaces())
    lacking = needs(tmp_path, program="no-such-program", folder=str(tmp_path / "none"))
    infos, complaints, silent = preflight([b], lacking, SHELL)
    assert (infos[b].has_folder, infos[b].has_program, silent) == (False, False, {})
    no_folder = error("missing. Copy", "b.invalid: ", f" {tmp_path}/none ")
    assert re.fullmatch(no_folder, complaints[b])
    lacking = needs(tmp_path, interface="none0")
    no_interface = error("interface", '"none0"', "b.invalid", "lo")
    assert re.fullmatch(no_interface, preflight([b], lacking, SHELL)[1][b])


def test_a_host_that_lacks_the_interpreter_has_answered(tmp_path: Path) -> None:
    """The history does not hold it against the host."""
    a, b = Host("a.invalid"), Host("b.invalid")
    script = 'case $0 in a*) eval "$1" ;; *) exit 1 ;; esac'
    shell = Transport("shell", ("sh", "-c", script), "rsh", "--hostfile FILE")
    lacking = needs(tmp_path, python=str(tmp_path / "python"))
    infos, complaints, silent = preflight([a, b], lacking, shell)
    assert (infos, list(complaints), list(silent)) == ({}, [a, b], [b])
    no_python = error("Install it at", f"a.invalid: {tmp_path}/python ", "mpiddp hosts push")
    assert re.fullmatch(no_python, complaints[a])


def test_a_host_is_asked_until_it_answers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One answers at once, one at its second login. One has another key, which only people change."""
    script = f"""
        case $0 in
            a*) ;;
            b*) [ -e {tmp_path}/came ] || {{ touch {tmp_path}/came; exit 1; }} ;;
            c*) echo Host key verification failed. >&2; exit 1 ;;
        esac; eval "$1" """
    monkeypatch.setattr("mpiddp.launch.preflight.PAUSE_S", 0.01)
    slow = Transport("shell", ("sh", "-c", script), "rsh", "--hostfile FILE", hint="Ask for help.")
    a, b, c = (Host(f"{name}.invalid") for name in "abc")
    infos, complaints, silent = preflight([a, b, c], needs(tmp_path), slow, wait_s=600.0)
    assert list(infos) == [a, b]
    assert list(complaints) == list(silent) == [c]
    said = "Host key verification failed."
    refused = error("Where ssh", "shell c.invalid ", said, ": --hostfile FILE ")
    assert re.fullmatch(rf"{refused}\nAsk for help\.", complaints[c])
    err = capfd.readouterr().err
    assert "2 of 3 hosts answer; waiting for b.invalid (up to " in err
    (tmp_path / "came").unlink()
    assert preflight([a, b], needs(tmp_path), slow, wait_s=600.0)[1] == {}
    assert "all 2 hosts answer after " in capfd.readouterr().err


# --- what is left of a job ---


def test_processes_of_the_job_alone_are_killed(capfd: pytest.CaptureFixture[str]) -> None:
    ours, other = (
        subprocess.Popen(["sleep", "1000"], env={**os.environ, "MPIDDP_JOB": job})
        for job in (f"1-{os.getpid()}", f"2-{os.getpid()}")
    )
    try:
        far = Host("far.invalid")
        kill_orphans([HERE, far], f"1-{os.getpid()}", sys.executable, SHELL)
        assert ours.wait(60) == -signal.SIGKILL
        assert other.poll() is None
        text = "mpiddp: killed leftover processes of the job on far.invalid: 1.\n"
        assert capfd.readouterr().err == text
        kill_orphans([far], f"1-{os.getpid()}", sys.executable, SHELL)
        assert capfd.readouterr().err == ""
        kill_orphans([far], f"2-{os.getpid()}", "/no/such/python", SHELL)
        assert capfd.readouterr().err == (
            "mpiddp: far.invalid cannot be reached, so no leftover process was killed there; "
            "its ranks end by themselves.\n"
        )
        kill_orphans([HERE], f"2-{os.getpid()}", sys.executable, SHELL)  # the launcher ends its own
        assert other.poll() is None
    finally:
        for each in (ours, other):
            each.kill()
            each.wait(PATIENCE_S)


def test_a_process_and_what_it_has_started() -> None:
    script = "trap '' TERM; sleep 1000 & sleep 1001 & echo; while :; do sleep 0.01; done"
    shell = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    assert shell.stdout is not None
    try:
        shell.stdout.readline()
        deadline = time.monotonic() + PATIENCE_S
        # Right after a fork, a child still has its parent's name.
        while list(descendants(shell.pid).values()).count("sleep") < 2:
            assert time.monotonic() < deadline
        assert descendants(os.getpid(), but=[shell.pid]).keys().isdisjoint([shell.pid])
        assert processor_time(shell.pid) >= 0.0

        def found() -> list[int]:
            return [] if shell.poll() is not None else [shell.pid, *descendants(shell.pid)]

        signal_all(found, signal.SIGTERM)
        assert shell.poll() is None
        end_all(found, grace_s=0.1)
        assert shell.wait(PATIENCE_S) == -signal.SIGKILL
        end_all(list, grace_s=1000.0)  # nothing is left
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        shell.stdout.close()


FAMILY = """
import os, signal, subprocess, sys
from mpiddp.hosts.processes import adopt_orphans, signal_at_parents_end
adopt_orphans()
shell = subprocess.run(["sh", "-c", "sleep 600 > /dev/null 2>&1 & echo $!"], capture_output=True, timeout=60)
orphan = int(shell.stdout)
status = open(f"/proc/{orphan}/stat").read().rpartition(")")[2].split()
print(int(status[1]) == os.getpid())
os.kill(orphan, signal.SIGKILL)
child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                         preexec_fn=lambda: signal_at_parents_end(signal.SIGTERM))
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_orphans_are_adopted_and_no_child_outlives_its_parent() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAMILY], capture_output=True, text=True, timeout=PATIENCE_S
    )
    is_adopted, pid = done.stdout.split()
    assert (is_adopted, done.returncode) == ("True", -signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_S
    while runs(int(pid)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def runs(pid: int) -> bool:
    """Whether it has not ended. Nobody may have collected it yet."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- mpiddp hosts run ---


def verb(tmp_path: Path, *arguments: str) -> int:
    (tmp_path / "hosts").write_text("localhost\n")
    name, *rest = arguments
    return main.main([name, str(tmp_path / "hosts"), *rest])


def test_a_command_on_every_host(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert verb(tmp_path, "run", "--", "sh", "-c", 'pwd; echo "$0" >&2', "a 'b\"") == 0
    assert capfd.readouterr() == (f"localhost: {tmp_path}\n", "localhost: a 'b\"\n")
    assert verb(tmp_path, "run", "--", "sh", "-c", "echo out; exit 4") == 1
    assert capfd.readouterr() == ("localhost: out\n", "localhost: exit code 4\n")
    assert verb(tmp_path, "run", "--", "no-such-program") == 1
    assert "no-such-program: No such file or directory" in capfd.readouterr().err
    options = ("--timeout", "90s", "--parallel", "1")
    assert verb(tmp_path, "run", *options, "--", "echo", "--timeout") == 0
    assert capfd.readouterr() == ("localhost: --timeout\n", "")
    with pytest.raises(UserError, match=error("hosts run", "mpiddp hosts run")):
        verb(tmp_path, "run")


def test_the_links_of_every_host(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert verb(tmp_path, "check", "--network") == 0
    out = capfd.readouterr().out
    assert out.startswith("host")
    assert "\nlocalhost: NCCL would take " in out
    assert out.endswith("\nnothing differs between the hosts\n")


AGENT = Path(run_agent.__file__)


@pytest.mark.parametrize(
    ("command", "stdout", "stderr", "code"),
    [
        (["pwd"], "{home}\n", "", 0),
        (["sh", "-c", "kill -9 $$"], "", "", 137),
        (["sh", "-c", "read line"], "", "", 1),  # stdin has nothing for it
        (["./no-such-program"], "", "./no-such-program: No such file or directory\n", 127),
    ],
)
def test_a_command_in_the_home_folder(
    tmp_path: Path, command: list[str], stdout: str, stderr: str, code: int
) -> None:
    """Of a host that lacks the folder. The program is what `mpiddp hosts run` sends."""
    call = f"main('proof', {str(tmp_path / 'none')!r}, {command!r})\n"
    done = subprocess.run(
        [sys.executable, "-"],
        input=AGENT.read_text() + call,
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.stdout == "proof\n" + stdout.format(home=tmp_path)
    assert (done.stderr, done.returncode) == (stderr, code)


def test_a_command_of_a_user_without_a_home(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-"],
        input=AGENT.read_text() + f"main('proof', {str(tmp_path / 'none')!r}, ['pwd'])\n",
        env={**os.environ, "HOME": str(tmp_path / "no home")},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("proof\n/\n", "", 0)


PROOF = "welcome\nmpiddp-hosts-run\n"


@pytest.mark.parametrize(
    ("answer", "timeout_s", "outcome"),
    [
        (Answer(0, f"{PROOF}out", "err"), None, ("out", "err", "")),
        (Answer(2, f"{PROOF}out", ""), 5.0, ("out", "", "exit code 2")),
        (Answer(None, f"{PROOF}out", ""), 5.0, ("out", "", "no end in 5 s; stopped")),
        (Answer(255, PROOF, "Connection closed"), None,
         ("", "Connection closed", "the connection was lost")),
        (Answer(255, PROOF, "mine"), None, ("", "mine", "exit code 255")),
        (Answer(NO_PROGRAM, "", ""), None, ("", "", error("mpiddp needs", "python3 "))),
    ],
)  # fmt: skip
def test_what_a_command_did(
    answer: Answer, timeout_s: float | None, outcome: tuple[str, str, str]
) -> None:
    stdout, stderr, failure = _outcome(HERE, answer, timeout_s)
    assert (stdout, stderr) == outcome[:2]
    assert re.fullmatch(outcome[2], failure)


# --- mpiddp hosts keys ---


@pytest.mark.parametrize(
    ("reached", "lines"),
    [
        ({"n1": ["n2"], "n2": ["n1"]}, ["n[1-2]: reaches every other host"]),
        ({"n1": ["n2"], "n2": []},
         ["n1: reaches every other host", "n2: reaches no other host"]),
        ({"n1": ["n2"], "n2": ["n1", "n3"], "n3": ["n1", "n2"]},
         ["n1: reaches n2, not n3", "n[2-3]: reaches every other host"]),
        ({"n1": []}, ["n1: reaches every other host"]),
    ],
)  # fmt: skip
def test_who_reaches_whom(reached: dict[str, list[str]], lines: list[str]) -> None:
    assert keys.summary(reached) == lines


@pytest.mark.parametrize(
    ("found", "unknown", "text"),
    [
        ([], ["n2", "n3"], "which other hosts it reaches is not known"),
        (["n2"], ["n3"], "reaches n2; not known: n3"),
        ([], ["n3"], "does not reach n2; not known: n3"),
    ],
)
def test_what_was_not_answered_is_not_known(
    found: list[str], unknown: list[str], text: str
) -> None:
    others = {"n2": ["n1", "n3"], "n3": ["n1", "n2"]}
    lines = keys.summary({"n1": found, **others}, {"n1": unknown})
    assert lines == [f"n1: {text}", "n[2-3]: reaches every other host"]


def test_this_machine_reaches_all() -> None:
    found, unknown = keys.reached([HERE, Host("127.0.0.1")], None)
    assert found == {"localhost": ["127.0.0.1"], "127.0.0.1": ["localhost"]}
    assert unknown == {}


@pytest.mark.parametrize(
    ("text", "jump", "written"),
    [
        ("login", Host("login"), "login"),
        ("me@login:2222", Host("login", user="me", port=2222), "me@login:2222"),
        ("me@10.0.0.1", Host("10.0.0.1", user="me"), "me@10.0.0.1"),
        ("2001:db8::1", Host("2001:db8::1"), "[2001:db8::1]"),
        ("me@[2001:db8::1]", Host("2001:db8::1", user="me"), "me@[2001:db8::1]"),
        ("[2001:db8::1]:2222", Host("2001:db8::1", port=2222), "[2001:db8::1]:2222"),
    ],
)
def test_a_jump_host(text: str, jump: Host, written: str) -> None:
    found = keys.parse_jump(text)
    assert found == jump
    assert keys._by_jump(["ssh", "--", "x"], found) == ["ssh", "-J", written, "--", "x"]
    assert keys._by_jump(["ssh"], None) == ["ssh"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", error("--jump: expected", "--jump: ", "--jump me@login.example.org")),
        ("a b", error("--jump: expected", "--jump: ", "--jump me@login.example.org")),
        ("a:x", error("--jump: expected", "--jump: ", "name[:port]", "me@login.example.org:2222")),
        ("a:123456", error("--jump: expected", "--jump: ")),
        ("-o", error("and would", '--jump: host "-o"')),
    ],
)
def test_no_jump_host(text: str, sentence: str) -> None:
    with pytest.raises(UserError, match=rf"^{sentence}$"):
        keys.parse_jump(text)


@pytest.mark.parametrize(
    ("said", "jump", "sentence"),
    [
        (
            "me@a: Permission denied (publickey).",
            None,
            error("key opens", "a: ", "run: ssh-add "),
        ),
        (
            "channel 0: open failed: connect failed: No route",
            Host("j"),
            error("not reach it", "a: j ", "(connect failed: No route)"),
        ),
    ],
)
def test_hosts_that_ssh_does_not_reach(said: str, jump: Host | None, sentence: str) -> None:
    with pytest.raises(UserError, match=rf"^{sentence}$"):
        keys._refuse({Host("a"): said}, jump)
    keys._refuse({}, jump)


def test_unknown_hosts_are_not_those_with_another_key() -> None:
    assert keys._is_unknown("Host key verification failed.")
    assert not keys._is_unknown("IDENTIFICATION HAS CHANGED!\nHost key verification failed.")
    assert not keys._is_unknown("Connection refused")


def test_a_key_is_added_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell of a host starts in the home folder."""
    monkeypatch.chdir(tmp_path)
    for key in ("ssh-ed25519 AAAA me@here", "ssh-ed25519 BBBB me@here", "ssh-ed25519 AAAA other"):
        keys._add_key(HERE, key, None)
    file = tmp_path / ".ssh" / "authorized_keys"
    lines = ["ssh-ed25519 AAAA me@here", "ssh-ed25519 BBBB me@here"]
    assert file.read_text().splitlines() == lines
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_text("old, without an end")
    keys._add_key(HERE, "ssh-rsa CCCC me", None)
    assert file.read_text().splitlines() == ["old, without an end", "ssh-rsa CCCC me"]
    file.unlink()
    file.mkdir()
    not_copied = error("Add this", "localhost: ", "~/.ssh/authorized_keys", ": ssh-rsa C me ")
    with pytest.raises(UserError, match=rf"^{not_copied}$"):
        keys._add_key(HERE, "ssh-rsa C me", None)


# --- the links of this machine ---


def test_the_facts_of_this_machine() -> None:
    found = fabric.facts([socket.gethostname(), "far.invalid"])
    assert found.keys() == {"links", "devices", "nccl", "gloo", "mpiddp"}
    assert "lo" not in [each["name"] for each in found["links"]]
    own = Interface("lo", "127.0.0.1", "127.0.0.0/8")
    assert fabric.leading_to(["127.0.0.1", "far.invalid"], [own]) == "nothing"
    assert fabric.gloo_choice([]) == "lo"
    addresses = {entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), 0)}
    named = [Interface(f"if-{each}", str(each), "") for each in addresses]
    assert fabric.gloo_choice(named).startswith("if-")
