"""A signal reaches the process that was checked, or none: never another one with the same pid.

Tests mpiddp/hosts/processes.py and mpiddp/launch/mpirun.py.
python -m pytest tests/unit/hosts/test_processes.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mpiddp.hosts.processes import kill_marked, opened
from mpiddp.launch.mpirun import remote_program
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT

Start = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process of a job that only its end stops."""
    started: list[subprocess.Popen[bytes]] = []

    def start(job: str) -> subprocess.Popen[bytes]:
        env = {**os.environ, "MPIDDP_JOB": job}
        process = subprocess.Popen(["sleep", "6000"], env=env)
        started.append(process)
        deadline = time.monotonic() + PATIENCE_S
        # Popen may return a moment before the kernel shows the variables.
        while f"MPIDDP_JOB={job}".encode() not in Path(f"/proc/{process.pid}/environ").read_bytes():
            assert time.monotonic() < deadline
        return process

    yield start
    for process in started:
        process.kill()
        process.wait(timeout=PATIENCE_S)


@pytest.fixture(params=["pidfd", "no pidfd", "no pidfd in this kernel"])
def _kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With pidfds, and as on a Python or a kernel without them."""

    def refuse(pid: int) -> int:
        raise OSError(38, "Function not implemented")

    if request.param == "no pidfd":
        monkeypatch.delattr(os, "pidfd_open")
    elif request.param == "no pidfd in this kernel":
        monkeypatch.setattr(os, "pidfd_open", refuse)


JOB = f"a{os.getpid()}"  # other tests of this machine may run at the same time


@pytest.mark.usefixtures("_kernel")
def test_only_processes_of_the_job_are_killed(start: Start) -> None:
    of_job, other = start(JOB), start(f"{JOB}1")
    assert kill_marked(f"MPIDDP_JOB={JOB}".encode()) == [of_job.pid]
    assert of_job.wait(timeout=PATIENCE_S) == -signal.SIGKILL
    assert other.poll() is None
    assert kill_marked(f"MPIDDP_JOB={JOB}".encode()) == []


def test_the_program_for_other_hosts_kills_and_prints(start: Start) -> None:
    of_job, other = start(JOB), start("")
    done = subprocess.run(
        [sys.executable, "-I"],
        input=remote_program(JOB),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.stdout, done.stderr) == (f"{of_job.pid}\n", "")
    assert of_job.wait(timeout=PATIENCE_S) == -signal.SIGKILL
    assert other.poll() is None


@pytest.mark.usefixtures("_kernel")
def test_a_process_that_has_ended(start: Start) -> None:
    process = start("")
    with opened(process.pid) as send:
        process.kill()
        process.wait(timeout=PATIENCE_S)
        with pytest.raises(ProcessLookupError):
            send(signal.SIGKILL)
    with pytest.raises(ProcessLookupError), opened(process.pid) as send:
        send(signal.SIGKILL)


# In a namespace whose next pid this process may choose.
REUSED = """
import signal, subprocess
from pathlib import Path
from mpiddp.hosts.processes import opened
first = subprocess.Popen(["sleep", "6000"])
with opened(first.pid) as send:
    first.kill()
    first.wait()
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(first.pid - 1))
    second = subprocess.Popen(["sleep", "6000"])
    print(second.pid == first.pid)
    try:
        send(signal.SIGKILL)
    except ProcessLookupError:
        print("refused")
    print(second.poll())
"""


def test_a_stranger_with_the_same_pid_is_not_killed() -> None:
    command = ["unshare", "-rpf", "--mount-proc", "--kill-child", sys.executable, "-c", REUSED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    if "unshare" in done.stderr or "ns_last_pid" in done.stderr:
        pytest.skip(f"no namespace for pids here: {done.stderr}")
    assert (done.stdout.split(), done.stderr) == (["True", "refused", "None"], "")
