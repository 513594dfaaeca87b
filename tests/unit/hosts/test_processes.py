"""A signal reaches the process that was checked, or none: never another one with the same pid."""

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from mpiddp.hosts import processes
from mpiddp.hosts.processes import OomKills, cores_of_group, group_of, kill_marked, kills_in
from tests.support.patience import PATIENCE_S, eventually
from tests.support.ranks import run_command


@pytest.fixture
def start():
    """Starts a process of a job that only its end stops."""
    with ExitStack() as stack:

        def start(job):
            env = {**os.environ, "MPIDDP_JOB": job}
            process = stack.enter_context(subprocess.Popen(["sleep", "6000"], env=env))
            stack.callback(process.kill)
            # Popen may return a moment before the kernel shows the variables.
            variables = Path(f"/proc/{process.pid}/environ")
            eventually(lambda: f"MPIDDP_JOB={job}".encode() in variables.read_bytes())
            return process

        yield start


@pytest.fixture(params=["pidfd", "no pidfd", "no pidfd in this kernel"])
def _kernel(request, monkeypatch):
    """With pidfds, and as on a Python or a kernel without them."""

    def refuse(pid):
        raise OSError(38, "Function not implemented")

    if request.param == "no pidfd":
        monkeypatch.delattr(os, "pidfd_open")
    elif request.param == "no pidfd in this kernel":
        monkeypatch.setattr(os, "pidfd_open", refuse)


JOB = f"a{os.getpid()}"  # other tests of this machine may run at the same time


@pytest.mark.usefixtures("_kernel")
def test_only_processes_of_the_job_are_killed(start):
    of_job, other = start(JOB), start(f"{JOB}1")
    assert kill_marked(f"MPIDDP_JOB={JOB}".encode()) == [of_job.pid]
    assert of_job.wait(timeout=PATIENCE_S) == -signal.SIGKILL
    assert other.poll() is None
    assert kill_marked(f"MPIDDP_JOB={JOB}".encode()) == []


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


def test_a_stranger_with_the_same_pid_is_not_killed():
    command = ["unshare", "-rpf", "--mount-proc", "--kill-child", sys.executable, "-c", REUSED]
    done = run_command(command)
    if "unshare" in done.stderr or "ns_last_pid" in done.stderr:
        pytest.skip(f"no namespace for pids here: {done.stderr}")
    assert (done.stdout.split(), done.stderr) == (["True", "refused", "None"], "")


NO_LIMIT_V1 = 0x7FFFFFFFFFFFF000


@pytest.mark.parametrize(
    ("lines", "folder"),
    [
        ("0::/user/job\n", "user/job"),
        ("0::/\n", ""),
        ("12:cpu,cpuacct:/c\n5:memory:/a/b:c\n0::/c\n", "memory/a/b:c"),
        ("12:cpu:/c\n", None),
        ("no columns\n", None),
        ("", None),
    ],
)
def test_the_control_group_of_a_process(monkeypatch, lines, folder):
    monkeypatch.setattr(
        processes, "fact_of", lambda pid, name: lines.encode() * ((pid, name) == ("self", "cgroup"))
    )
    assert group_of() == (None if folder is None else Path("/sys/fs/cgroup", folder))


@pytest.mark.parametrize(
    ("files", "kills"),
    [
        ({"memory.events": "low 0\noom 2\noom_kill 1\n", "memory.max": "4096\n"}, OomKills(1, 4096)),
        ({"memory.events": "oom_kill 0\n", "memory.max": "max\n"}, OomKills(0, None)),
        ({"memory.events": "low 0\n", "memory.max": "max\n"}, None),
        ({"memory.oom_control": "under_oom 0\noom_kill 3\n", "memory.limit_in_bytes": "8192\n"},
         OomKills(3, 8192)),
        ({"memory.oom_control": "oom_kill 3\n", "memory.limit_in_bytes": f"{NO_LIMIT_V1}\n"},
         OomKills(3, None)),
        ({"memory.oom_control": "oom_kill 3\n", "memory.limit_in_bytes": f"{1 << 60}\n"},
         OomKills(3, 1 << 60)),
        ({"memory.oom_control": "oom_kill 3\n", "memory.limit_in_bytes": f"{(1 << 60) + 4096}\n"},
         OomKills(3, None)),
        ({"memory.oom_control": "oom_kill many\n", "memory.limit_in_bytes": "1\n"}, None),
        ({"memory.events": "oom_kill 1\n"}, None),
        ({}, None),
    ],
)  # fmt: skip
def test_the_kills_of_a_control_group(tmp_path, files, kills):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert kills_in(tmp_path) == kills


@pytest.mark.parametrize(
    ("outer", "inner", "cores"),
    [
        ({}, {}, 64.0),
        ({"cpu.max": "max 100000"}, {"cpu.max": "250000 100000"}, 2.5),
        ({"cpu.max": "150000 100000"}, {"cpu.max": "max 100000"}, 1.5),
        ({"cpu.max": "50000 100000"}, {}, 1.0),
        ({}, {"cpu.cfs_quota_us": "400000", "cpu.cfs_period_us": "100000"}, 4.0),
        ({}, {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, 64.0),
    ],
    ids=["no limit", "own", "above", "less than one", "v1", "v1 without"],
)
def test_the_quota_of_a_control_group_limits_its_cores(outer, inner, cores, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    own = tmp_path / "outer" / "inner"
    own.mkdir(parents=True)
    for folder, files in ((own.parent, outer), (own, inner)):
        for name, text in files.items():
            (folder / name).write_text(f"{text}\n")
    assert cores_of_group(own) == cores
