"""Programs on hosts, where each host is this machine: no ssh is between.

Tests mpiddp/hosts/{ssh,processes,run}.py, and mpiddp/launch/{preflight,mpirun}.py.
python -m pytest tests/unit/hosts/test_on_this_machine.py
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpiddp.errors import UserError
from mpiddp.hosts import main, run, ssh
from mpiddp.hosts.complaints import NO_PROGRAM, Answer
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.interfaces import interfaces
from mpiddp.hosts.private import new_name
from mpiddp.hosts.processes import descendants, end_all, signal_all, usage_of
from mpiddp.hosts.remote import ask_hosts
from mpiddp.hosts.ssh import (
    Logins,
    logins_at_once,
    run_on_hosts,
    shell_command,
    ssh_config,
)
from mpiddp.hosts.transport import QRSH, SSH, Transport
from mpiddp.launch.mpirun import kill_orphans
from mpiddp.launch.preflight import Needs, preflight
from tests.support.cluster.needs import need
from tests.support.errors import error
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT

HERE = Host("localhost")
# A transport whose hosts are all this machine: the shell gets the host's name as $0, and the line as $1.
SHELL = Transport("shell", ("sh", "-c", 'eval "$1"'), "rsh", instead="--hostfile FILE")


@pytest.fixture(autouse=True)
def python3(monkeypatch):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")


# --- one program on all hosts ---


def run_here(program, python=sys.executable):
    return run_on_hosts([HERE], program, python=python, work_s=PATIENCE_S)[HERE]


def test_a_login_that_stays_open_takes_one_program_after_the_other():
    """Until one fails, or it is closed."""

    def ask(program):
        limits = {"work_s": PATIENCE_S, "logins": logins}
        found, failures, _ = ask_hosts([HERE], program, python=sys.executable, **limits)
        return found.get(HERE) or failures[HERE]

    with contextlib.closing(Logins()) as logins:
        first, second = (ask("import os; print(os.getpid())") for _ in range(2))
        assert first == second
        assert "does not run there: no such thing" in ask("import sys; sys.exit('no such thing')")
        assert not logins
        third = ask("import os; print(os.getpid())")
        assert third != first
    assert not Path(f"/proc/{third}").exists()


def test_each_host_answers_for_itself():
    hosts = [Host(f"node{index}.invalid") for index in range(3)]
    program = f"""import os, sys
more = {"x" * 500_000!r}  # more than a pipe holds
print(os.getcwd(), len(more)); print('err', file=sys.stderr); sys.exit(3)"""
    answers = run_on_hosts(hosts, program, python=sys.executable, work_s=60, transport=SHELL)
    assert answers == dict.fromkeys(hosts, Answer(3, "/ 500000\n", "err\n"))


@pytest.mark.parametrize("shell", ["sh", "tcsh"])
def test_a_login_shell_of_another_kind(shell):
    """What a program prints at its end is no sign of its end."""
    need(shell)
    login = Transport("shell", ("sh", "-c", f'exec {shell} -c "$1"'), "rsh", instead="--hostfile F")
    program = "import time; print('mpiddp-answered', flush=True); time.sleep(0.1); print('$HOME')"
    (answer,) = run_on_hosts([Host("a.invalid")], program, transport=login).values()
    assert (answer.exit_code, answer.stdout) == (0, "mpiddp-answered\n$HOME\n")


FEW_FILES = """
import resource, sys
from mpiddp.hosts import ssh
from mpiddp.hosts.hostfile import Host
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
hosts = [Host(f"127.0.0.{number}") for number in range(1, 21)]
program = f'''
import os, time
os.chdir({sys.argv[1]!r})
try:
    os.mkdir("first")
    while not os.path.exists("others") or os.path.getsize("others") < 19:
        time.sleep(0.02)
except FileExistsError:
    with open("others", "a") as others:
        others.write("x")
    print("here")'''
answers = ssh.run_on_hosts(hosts, program, work_s=600.0)
print(sorted(answer.stdout for answer in answers.values()) == ["", *["here\\n"] * 19])
"""


def test_twenty_hosts_with_32_open_files(tmp_path):
    """As many at a time as the limit allows. None waits for the first one, which ends as the last."""
    done = subprocess.run(
        [sys.executable, "-c", FEW_FILES, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_only_another_host_needs_ssh(tmp_path, monkeypatch):
    (tmp_path / "sh").symlink_to("/bin/sh")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run_here("print(1)").stdout == "1\n"
    with pytest.raises(UserError, match=error("Run: sudo", "ssh is not installed here.")):
        run_on_hosts([HERE, Host("192.0.2.7")], "")


def test_no_shell_interprets_the_program_or_its_input(tmp_path):
    for program in ("$(touch made)", "; touch made #", "`touch made`", "' ; touch made '"):
        answer = run_here("1\n", program.replace("made", str(tmp_path / "made")))
        assert (answer.exit_code, answer.stdout) == (NO_PROGRAM, "")
    folder = tmp_path / "with blank; and $HOME"
    folder.mkdir()
    (folder / "python").symlink_to(sys.executable)
    assert run_here("print('$HOME')\n", str(folder / "python")).stdout == "$HOME\n"
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_background_processes_of_a_program_are_not_waited_for():
    """For example a connection that ssh keeps open for reuse, which keeps stderr open."""
    start = time.monotonic()
    answer = run_here("import os; os.system('sleep 1000 & echo $!')")
    Path("/proc", answer.stdout.strip(), "status").read_text(encoding="utf-8")  # it still runs
    assert time.monotonic() - start < 50
    assert answer.exit_code == 0
    os.kill(int(answer.stdout), signal.SIGKILL)


def test_a_program_that_does_not_end_is_killed(monkeypatch):
    monkeypatch.setattr(ssh, "_END_S", 0.1)
    program = "import time; print(1, flush=True); time.sleep(1000)"
    began = time.monotonic()
    quick = SSH._replace(login_s=0.1)
    answer = run_on_hosts([HERE], program, python=sys.executable, work_s=0.2, transport=quick)[HERE]
    assert (answer.exit_code, answer.stdout) in ((None, "1\n"), (None, ""))
    assert 0.1 <= time.monotonic() - began < 60


# --- the preflight ---


def needs(here, **more):
    mpirun = here / "mpirun"
    mpirun.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 5.0.11'\necho more\n")
    mpirun.chmod(0o755)
    paths = {"python": sys.executable, "mpirun": str(mpirun), "daemon": str(mpirun)}
    return Needs(**{**paths, "folder": str(here), "path": "/bin:/usr/bin", **more})


def test_a_host_says_what_it_has(tmp_path):
    a, b = Host("a.invalid"), Host("b.invalid")
    infos, complaints, silent, *_ = preflight([a, b], needs(tmp_path), SHELL)
    assert (list(infos), complaints, silent) == ([a, b], {}, {})
    assert infos[a].host == a
    assert infos[a].mpirun == "mpirun (Open MPI) 5.0.11"
    assert (infos[a].has_folder, infos[a].has_daemon, infos[a].has_program) == (True, True, True)
    assert infos[b].interfaces == tuple(interfaces())
    lacking = needs(tmp_path, program="no-such-program", folder=str(tmp_path / "none"))
    infos, complaints, silent, *_ = preflight([b], lacking, SHELL)
    assert (infos[b].has_folder, infos[b].has_program, silent) == (False, False, {})
    no_folder = error("missing. Copy", "b.invalid: ", f" {tmp_path}/none ")
    assert re.fullmatch(no_folder, complaints[b])
    lacking = needs(tmp_path, interface="none0")
    no_interface = error("interface", '"none0"', "b.invalid", "lo")
    assert re.fullmatch(no_interface, preflight([b], lacking, SHELL)[1][b])


def test_a_host_that_lacks_the_interpreter_has_answered(tmp_path):
    """The history does not hold it against the host."""
    a, b = Host("a.invalid"), Host("b.invalid")
    script = 'case $0 in a*) eval "$1" ;; *) exit 1 ;; esac'
    shell = Transport("shell", ("sh", "-c", script), "rsh", "--hostfile FILE")
    lacking = needs(tmp_path, python=str(tmp_path / "python"))
    infos, complaints, silent, *_ = preflight([a, b], lacking, shell)
    assert (infos, list(complaints), list(silent)) == ({}, [a, b], [b])
    no_python = error("Install it, and", f"a.invalid: {tmp_path}/python ", "mpiddp hosts push")
    assert re.fullmatch(no_python, complaints[a])
    assert "Install the same Python there" not in complaints[a]


def test_a_python_that_is_too_old_or_another_one_is_named_as_that(tmp_path):
    """It has answered: the history does not hold it against the host."""
    old, broken, other = (tmp_path / name for name in ("old", "broken", "other"))
    old.write_text("#!/bin/sh\necho 'it is Python 3.6, and 3.8 or newer is needed' >&2; exit 1\n")
    broken.write_text("#!/bin/sh\necho 'libpython3.so: cannot open' >&2; exit 127\n")
    lines = "import sys; sys.version = '3.99.1 (main)'"
    other.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{lines}; $2"\n')
    a = Host("a.invalid")
    for python, said in (
        (old, "it is Python 3.6, and 3.8 or newer is needed. Install the same Python there"),
        (broken, "libpython3.so: cannot open. Install the same Python there"),
        (other, "is Python 3.99 there, 3."),
    ):
        python.chmod(0o755)
        _, complaints, silent, *_ = preflight([a], needs(tmp_path, python=str(python)), SHELL)
        assert silent == {}
        assert complaints[a].startswith(f"a.invalid: {python} ")
        assert said in complaints[a]


def test_a_host_is_asked_until_it_answers(tmp_path, capfd, monkeypatch):
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
    infos, complaints, silent, *_ = preflight([a, b, c], needs(tmp_path), slow, wait_s=600.0)
    assert list(infos) == [a, b]
    assert list(complaints) == list(silent) == [c]
    said = "Host key verification failed."
    refused = error("Where ssh", "shell c.invalid ", said, ": --hostfile FILE ")
    assert re.fullmatch(rf"{refused}\nAsk for help\.", complaints[c])
    err = capfd.readouterr().err
    assert err.startswith("mpiddp: waiting for b.invalid (up to ")


# --- what is left of a job ---


def test_processes_of_the_job_alone_are_killed(capfd):
    ours, other = (
        subprocess.Popen(["sleep", "1000"], env={**os.environ, "MPIDDP_JOB": job})
        for job in (f"1-{os.getpid()}", f"2-{os.getpid()}")
    )
    try:
        far = Host("far.invalid")
        kill_orphans([far], f"1-{os.getpid()}", new_name(), sys.executable, SHELL)
        assert ours.wait(60) == -signal.SIGKILL
        assert other.poll() is None
        text = "mpiddp: killed leftover processes of the job on far.invalid: 1.\n"
        assert capfd.readouterr().err == text
        kill_orphans([far], f"1-{os.getpid()}", new_name(), sys.executable, SHELL)
        assert capfd.readouterr().err == ""
        kill_orphans([far], f"2-{os.getpid()}", new_name(), "/no/such/python", SHELL)
        assert capfd.readouterr().err == (
            "mpiddp: far.invalid cannot be reached, so no leftover process was killed there; "
            "its ranks end by themselves.\n"
        )
    finally:
        for each in (ours, other):
            each.kill()
            each.wait(PATIENCE_S)


def test_a_process_and_what_it_has_started():
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
        assert usage_of(shell.pid)["cpu_s"] >= 0.0

        def found():
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


def test_orphans_are_adopted_and_no_child_outlives_its_parent():
    done = subprocess.run(
        [sys.executable, "-c", FAMILY], capture_output=True, text=True, timeout=PATIENCE_S
    )
    is_adopted, pid = done.stdout.split()
    assert (is_adopted, done.returncode) == ("True", -signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_S
    while runs(int(pid)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def runs(pid):
    """Whether it has not ended. Nobody may have collected it yet."""
    try:
        return (
            Path("/proc", str(pid), "stat")
            .read_text(encoding="utf-8")
            .rpartition(")")[2]
            .split()[0]
            != "Z"
        )
    except OSError:
        return False


# --- mpiddp hosts run ---


def verb(tmp_path, *arguments):
    (tmp_path / "hosts").write_text("localhost\n")
    name, *rest = arguments
    return main.main([name, str(tmp_path / "hosts"), *rest])


def test_answers_are_printed_as_they_come(tmp_path, monkeypatch):
    """A host that does not end hides no other one's answer, and --timeout ends it."""
    monkeypatch.setattr(ssh, "_TOGETHER_S", 0.05)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    script = f'case $0 in slow*) cat {pipe} > /dev/null ;; esac; eval "$1"'
    shell = Transport("shell", ("sh", "-c", script), "rsh", "--hostfile FILE")
    quick, slow = Host("quick.invalid"), Host("slow.invalid")
    came = []

    def show(answers):
        came.append([*answers])
        if came == [[quick]]:
            pipe.write_text("go")  # only now the other one ends

    run_on_hosts([slow, quick], "", transport=shell._replace(login_s=PATIENCE_S), show=show)
    assert came == [[quick], [slow]]


def test_a_large_output_costs_no_more_than_its_size():
    """32 MB took 3 s of processor time when each piece was added to a string."""
    program = "import sys; [sys.stdout.write('x' * 65536) for _ in range(512)]"
    began = time.process_time()
    answer = run_here(program)
    assert len(answer.stdout) == 32 << 20
    assert time.process_time() - began < 1.5


@pytest.mark.parametrize("has_jump", [False, True])
def test_logins_are_bounded(tmp_path, has_jump, monkeypatch):
    """Each login waits until as many are open as may be: one more would be counted."""
    ssh = tmp_path / "ssh"
    ssh.write_text(f"""#!/bin/sh
        case $1 in -G) echo {"proxyjump login" if has_jump else "port 22"}; exit ;; esac
        touch {tmp_path}/login.$$
        ls {tmp_path} | grep -c '^login' >> {tmp_path}/counts
        sleep 0.05
        rm {tmp_path}/login.$$
        while [ "$1" != -- ]; do shift; done; shift 2; eval "$1" """)
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    hosts = [Host(f"192.0.2.{number}") for number in range(40)]
    answers = run_on_hosts(hosts, "", work_s=PATIENCE_S)
    assert [answer.exit_code for answer in answers.values()] == [0] * 40
    most = max(map(int, (tmp_path / "counts").read_text().split()))
    assert most <= (8 if has_jump else 32)
    assert logins_at_once(hosts[:8]) == 32


@pytest.mark.parametrize(
    ("command", "stdout", "stderr", "code"),
    [
        (["pwd"], "{home}\n", "", 0),
        (["sh", "-c", "kill -9 $$"], "", "", 137),
        (["sh", "-c", "read line"], "", "", 1),  # stdin has nothing for it
        (["./no-such-program"], "", "./no-such-program: No such file or directory\n", 127),
    ],
)
@pytest.mark.parametrize("has_home", [True, False])
def test_a_command_in_the_home_folder(tmp_path, has_home, command, stdout, stderr, code):
    """Of a host that lacks the folder. The program is what `mpiddp hosts run` sends."""
    values = {"FOLDER": str(tmp_path / "none"), "COMMAND": command, "ENDED": "ended "}
    home = tmp_path if has_home else tmp_path / "no home"
    done = subprocess.run(
        [sys.executable, "-"],
        input="".join(f"{name} = {value!r}\n" for name, value in values.items()) + run._AGENT,
        env={**os.environ, "HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.stdout == stdout.format(home=home if has_home else "/")
    assert (done.stderr, done.returncode) == (f"{stderr}ended {code}\n", code)


ENDED = "mpiddp-hosts-run ended: "


@pytest.mark.parametrize(
    ("answer", "timeout_s", "failure"),
    [
        (Answer(0, "out", f"err{ENDED}0\n"), None, ""),
        (Answer(2, "out", f"{ENDED}2\n"), 5.0, "exit code 2"),
        (Answer(None, "out", ""), 5.0, "no end in 5 s; stopped"),
        (Answer(255, "", "Connection closed"), None, "the connection was lost"),
        # ssh to another host is a command too
        (Answer(255, "", f"Connection refused\n{ENDED}255\n"), None, "exit code 255"),
        (Answer(NO_PROGRAM, "", ""), None, error("is missing", "python3 ")),
    ],
)  # fmt: skip
def test_what_a_command_did(answer, timeout_s, failure):
    assert re.fullmatch(failure, run._failure(HERE, answer, timeout_s))


def test_the_command_for_a_host():
    *command, line = shell_command(Host("192.0.2.7", user="ann", port=2222), "date", SSH, "file")
    assert command == ["ssh", "-F", "file", "-T", "--", "192.0.2.7"]
    assert line == "exec sh -c date"
    argv = shell_command(Host("192.0.2.7"), "date", QRSH, "")
    assert argv == ["qrsh", "-inherit", "192.0.2.7", line]
    assert shell_command(Host("localhost"), "date", SSH, "") == ["sh", "-c", "date"]


def options_of(config, target):
    """What ssh makes of a configuration for a host. It reads a file of settings once."""
    command = ["ssh", "-F", config, "-G", "--", target]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    return dict(line.partition(" ")[::2] for line in done.stdout.splitlines())


def test_one_configuration_of_ssh(tmp_path):
    """The hostfile's users and ports, the settings of a job, and then the user's for the same name."""
    need("ssh")
    own = tmp_path / "config"
    own.write_text(
        "Host gpu2\n  HostName 192.0.2.9\n  User bob\n  IdentityFile /k\nHost *\n  ControlMaster auto\n"
        "  RemoteCommand tmux\n  RequestTTY force\n  BatchMode no\n  Port 99\n"
    )
    hosts = [Host("gpu2", port=2222), Host("fd77::2", user="ann"), Host("plain")]
    text = ssh_config(hosts, SSH._replace(login_s=60.0))
    assert "Include ~/.ssh/config\n" in text
    config = tmp_path / "job"
    config.write_text(text.replace("~/.ssh/config", str(own)))
    found = options_of(config, "gpu2")
    assert (found["hostname"], found["port"], found["user"]) == ("192.0.2.9", "2222", "bob")
    assert (found["identityfile"], found["connecttimeout"]) == ("/k", "20")
    settings = ("controlmaster", "requesttty", "batchmode", "clearallforwardings")
    assert [found[name] for name in settings] == ["false", "false", "yes", "yes"]
    assert found.get("remotecommand", "none") == "none"
    found = options_of(config, hosts[1].alias)
    assert (found["hostname"], found["user"], found["port"]) == ("fd77::2", "ann", "99")
    assert options_of(config, "plain")["port"] == "99"
