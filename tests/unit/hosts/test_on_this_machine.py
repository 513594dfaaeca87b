"""Programs on hosts, where each host is this machine: no ssh is between."""

import contextlib
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpiddp.hosts import interfaces
from mpiddp.hosts.complaints import NO_PROGRAM
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.ssh import Logins, ask_hosts
from mpiddp.hosts.transport import Transport
from mpiddp.launch.run.outcome_file import outcome_of
from tests.support.cluster.needs import need
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT

HERE = Host("localhost")


@pytest.fixture(autouse=True)
def python3(monkeypatch):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def run_here(program, python=sys.executable, logins=None):
    return ask_hosts([HERE], program, python=python, work_s=PATIENCE_S, logins=logins)[HERE]


def test_a_login_that_stays_open_takes_one_program_after_the_other():
    """Until one fails, or it is closed."""

    says_its_pid = "import os; print(os.getpid())"
    with contextlib.closing(Logins()) as logins:
        first, second = (run_here(says_its_pid, logins=logins).value for _ in range(2))
        assert first == second
        failed = run_here("import sys; sys.exit('no such thing')", logins=logins)
        assert "does not run there: no such thing" in failed.why
        assert not logins
        third = run_here(says_its_pid, logins=logins).value
        assert third != first
        (login,) = logins.values()
        login.process.kill()  # as ssh ends when its network was down for some seconds
        login.process.wait()
        assert run_here(says_its_pid, logins=logins).value not in (None, third)
    assert not Path(f"/proc/{third}").exists()


@pytest.mark.parametrize("shell", ["sh", "tcsh", "fish"])
def test_a_login_shell_of_another_kind(shell):
    """What a program prints at its end is no sign of its end."""
    need(shell)
    login = Transport("shell", ("sh", "-c", f'exec {shell} -c "$1"'), "rsh", fix="F")
    program = "import time; print('mpiddp-answered', flush=True); time.sleep(0.1); print('$HOME')"
    (answer,) = ask_hosts([Host("a.invalid")], program, transport=login).values()
    assert (answer.exit_code, answer.stdout) == (0, "mpiddp-answered\n$HOME\n")


def test_no_shell_interprets_the_program_or_its_input(tmp_path):
    for program in ("$(touch made)", "; touch made #", "`touch made`", "' ; touch made '"):
        answer = run_here("1\n", program.replace("made", str(tmp_path / "made")))
        assert (answer.exit_code, answer.stdout) == (NO_PROGRAM, "")
    folder = tmp_path / "with blank; and $HOME"
    folder.mkdir()
    (folder / "python").symlink_to(sys.executable)
    assert run_here("print('$HOME')\n", str(folder / "python")).stdout == "$HOME\n"
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_too_few_open_files_are_named():
    mpiddp = [
        sys.executable,
        "-m",
        "mpiddp",
        "hosts",
        "run",
        "-H",
        "127.0.0.[1-40]",
        "--",
        "sleep",
        "1",
    ]
    limited = ["sh", "-c", 'ulimit -n 64; exec "$@"', "sh", *mpiddp]
    done = subprocess.run(limited, capture_output=True, text=True, cwd=ROOT)
    refused = "mpiddp: this machine gives no more processes or open files to mpiddp: Too many open files.\n  fix: "
    assert (done.returncode, done.stderr.startswith(refused)) == (1, True), done.stderr
    of_launch = outcome_of(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    assert refused.startswith(f"mpiddp: {of_launch.sentence}".partition("\n")[0])


def test_a_bridge_of_containers_is_told_from_a_network_of_hosts():
    """Docker's bridges end with twelve digits; br-ex is that of Open vSwitch on each host of OpenStack."""
    names = ("docker0", "br-0a1b2c3d4e5f", "br-ex", "br-mgmt")
    virtual = [interfaces.Interface(name, "10.0.0.1", "10.0.0.0/24").is_virtual for name in names]
    assert virtual == [True, True, False, False]
