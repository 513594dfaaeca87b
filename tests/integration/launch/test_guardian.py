"""The guardian of a command: each signal arrives once, and no process is left, whoever is killed.

Tests mpiddp/runtime/start/guardian.py.
python -m pytest tests/integration/launch/test_guardian.py
"""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from mpiddp.hosts.processes import descendants
from tests.support.patience import PATIENCE_S
from tests.support.ranks import clean_env

# A rank with a command. argv[1] runs before the command starts.
RANK = """
import os, sys
from mpiddp.protocol.variables import AGENT_STORE
from mpiddp.runtime.start.guardian import Guardian
exec(sys.argv[1])
guardian = Guardian(sys.argv[2:], {**os.environ, AGENT_STORE: "True"}, keeps_stdin=True)
print("ended", guardian.wait(), *sorted(guardian.passed), flush=True)
"""
# Prints the signals that it gets, until SIGUSR2.
COUNTS = """
import os, signal
numbers = set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}
signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
os.write(1, b"ready\\n")
while (number := signal.sigwait(numbers)) != signal.SIGUSR2:
    os.write(1, f"{number.name}\\n".encode())
"""
# Processes that ignore SIGTERM, in the command's process group and in a session of their own.
STUBBORN = "trap '' TERM; sleep 1001 & setsid sleep 1002 & echo ready; sleep 1003; sleep 1004"


@contextmanager
def rank(
    *command: str, before: str = "pass", ignored: Sequence[int] = ()
) -> Iterator[subprocess.Popen[str]]:
    """A rank whose command has printed that it is ready, and which takes signals."""

    def prepare() -> None:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)

    with subprocess.Popen(
        [sys.executable, "-c", RANK, before, *command],
        env=clean_env(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=prepare,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            wait_until(lambda: catches(process.pid, signal.SIGTERM))
            yield process
        finally:
            process.kill()


def catches(pid: int, number: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def have_ended(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() and is_running(pid) for pid in pids)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


COUNTER = (sys.executable, "-S", "-c", COUNTS)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_to_the_rank_arrives_once(number: int) -> None:
    with rank(*COUNTER) as process:
        process.send_signal(number)
        assert process.stdout is not None
        assert process.stdout.readline() == f"{signal.Signals(number).name}\n"
        process.send_signal(signal.SIGUSR2)
        printed = process.communicate(timeout=PATIENCE_S)[0]
    passed = " ".join(str(int(each)) for each in sorted((number, signal.SIGUSR2)))
    assert printed == f"ended 0 {passed}\n"


def test_a_signal_to_every_process_arrives_once() -> None:
    """As from systemd or a batch system: the command gets it from there."""
    with rank(*COUNTER) as process:
        # The rank last: the guardian waits for 0.1 s whether it gets the signal itself.
        for pid in [*descendants(process.pid), process.pid]:
            os.kill(pid, signal.SIGTERM)
        assert process.stdout is not None
        assert process.stdout.readline() == "SIGTERM\n"
        process.send_signal(signal.SIGUSR2)
        printed = process.communicate(timeout=PATIENCE_S)[0]
    assert printed == "ended 0 12 15\n"


def test_an_ignored_signal_stays_ignored() -> None:
    """As under nohup."""
    show = "echo ready; read line; grep SigIgn /proc/self/status"
    with rank("sh", "-c", show, ignored=[signal.SIGHUP]) as process:
        process.send_signal(signal.SIGHUP)
        printed = process.communicate("\n", timeout=PATIENCE_S)[0]
    ignored, end = printed.splitlines()
    assert int(ignored.split()[1], 16) & 1 << (signal.SIGHUP - 1)
    assert end == "ended 0"


@pytest.mark.parametrize("held", ["pass", "os.fork() or __import__('time').sleep(1000)"])
def test_a_killed_rank_leaves_no_process(held: str) -> None:
    """Also if a process that it has forked holds the connection to the guardian open."""
    with rank("bash", "-c", STUBBORN, before=held) as process:
        wait_until(lambda: len(descendants(process.pid)) >= 5)
        children = descendants(process.pid)
        holders = [pid for pid in children if "-c" in command_of(pid) and not is_guardian(pid)]
        process.kill()
        wait_until(lambda: have_ended([pid for pid in children if pid not in holders]))
        for pid in holders:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def command_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def is_guardian(pid: int) -> bool:
    """A guardian is the only one with a process group of its own that was not started by exec."""
    return os.getpgid(pid) == pid or "bash" in command_of(pid)[0]


def test_a_killed_guardian_leaves_no_process() -> None:
    with rank("bash", "-c", STUBBORN) as process:
        wait_until(lambda: len(descendants(process.pid)) >= 5)
        started = descendants(process.pid)
        guardian = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
        os.kill(guardian, signal.SIGKILL)
        printed = process.communicate(timeout=PATIENCE_S)[0]
        assert have_ended(started)
    assert printed == "ended None\n"


def test_what_the_command_leaves_in_the_background_ends_with_it() -> None:
    with rank("bash", "-c", "sleep 1001 & setsid sleep 1002 & echo ready; read line") as process:
        wait_until(lambda: len(descendants(process.pid)) >= 4)
        started = descendants(process.pid)
        printed = process.communicate("\n", timeout=PATIENCE_S)[0]
        assert have_ended(started)
    assert printed == "ended 0\n"


@pytest.mark.parametrize(("end", "code"), [("exit 3", 3), ("kill -KILL $$", -9)])
def test_the_end_of_the_command(end: str, code: int) -> None:
    with rank("sh", "-c", f"echo ready; read line; {end}") as process:
        printed = process.communicate("\n", timeout=PATIENCE_S)[0]
    assert printed == f"ended {code}\n"


def test_a_large_environment_reaches_the_command() -> None:
    before = "os.environ.update({f'LARGE{i}': 'x' * 100_000 for i in range(8)})"
    with rank("sh", "-c", "echo ready; env | grep -c LARGE.=xxxx", before=before) as process:
        assert process.communicate(timeout=PATIENCE_S)[0] == "8\nended 0\n"


def test_a_command_that_cannot_start() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RANK, "pass", "/nowhere/program"],
        env=clean_env(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith("FileNotFoundError: [Errno 2] No such file or directory\n")


def test_the_command_reads_the_terminal_and_gets_its_ctrl_c() -> None:
    """A rank without a launcher, typed into a shell."""
    pid, terminal = pty.fork()
    if pid == 0:
        command = ["sh", "-c", "read line; echo got $line; exec sleep 1000"]
        os.execve(sys.executable, [sys.executable, "-c", RANK, "pass", *command], clean_env())
    os.write(terminal, b"hello\n")
    printed = b""
    while b"got hello" not in printed:
        printed += os.read(terminal, 1024)
    wait_until(lambda: any(command_of(each)[0] == "sleep" for each in descendants(pid)))
    os.write(terminal, b"\x03")
    while b"ended -2" not in printed:
        printed += os.read(terminal, 1024)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(terminal)
