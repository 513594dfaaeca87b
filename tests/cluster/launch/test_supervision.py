"""Failures on real hosts: the launcher detects each in time, names the right rank, and leaves no process.

Tests mpiddp/launch/supervise/.
python -m pytest tests/cluster/launch/test_supervision.py
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from tests.support import cluster
from tests.support.cluster import Cluster, Program
from tests.support.mpis import PACKAGES, mpirun_of
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT

OTHERS = "The other ranks were stopped."
MPIS = ("openmpi5", *PACKAGES)
SCRIPT = """
import os, sys, threading, time
import mpiddp, torch, torch.distributed as dist

with mpiddp.process_group() as world:
    print("ready", flush=True)
    for step in range(100_000):
        dist.all_reduce(torch.ones(1))
        mpiddp.should_stop()
        if step == 10 and world.rank == 1:
            exec(sys.argv[1])
        time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with cluster.up_or_skip(3) as standing:
        (standing.shared / "script.py").write_text(SCRIPT)
        yield standing


@dataclass
class Job:
    """A started job of one rank on each of three hosts."""

    hosts: Cluster
    program: Program
    since: float

    def end(self) -> str:
        """Wait until the launcher has ended with code 1 and no rank is left, and return its own lines.

        Lines about leftover processes are left out: on a slow machine these may be ranks that were ending.
        """
        stderr = self.program.communicate(timeout=PATIENCE_S)[1]
        self.seconds = time.monotonic() - self.since
        assert self.program.returncode == 1, stderr
        pythons = wait_for(
            lambda: [c for c in commands(self.hosts) if "python" in c.split()[0]], []
        )
        assert pythons == []
        # mpirun's own last line may lack a newline.
        own = re.findall(r"^.*?(mpiddp: (?!.*\bleftover process).*)$", stderr, re.MULTILINE)
        return "\n".join(own) or stderr

    def kill(self, host: str, program: str) -> None:
        found = [
            p.pid for p in self.hosts[host].processes() if p.command.split()[0].endswith(program)
        ]
        self.hosts[host].run(["kill", "-KILL", str(found[0])], check=True)


def commands(hosts: Cluster) -> list[str]:
    return [process.command for host in hosts.hosts for process in host.processes()]


def wait_for(
    value: Callable[[], list[str]], expected: list[str], timeout_s: float = PATIENCE_S
) -> list[str]:
    """Wait until `value()` is as expected, at most `timeout_s`, and return its last result."""
    deadline = time.monotonic() + timeout_s
    while (found := value()) != expected and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def start(hosts: Cluster, act: str = "pass", *options: str, mpi: str = "openmpi5") -> Job:
    command = [sys.executable, "-m", "mpiddp", "launch", *options, "--mpirun", mpirun_of(mpi)]
    command += ["-H", "node0:1,node1:1,node2:1", str(hosts.shared / "script.py"), act]
    program = hosts["node0"].popen(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    assert program.stdout is not None
    assert [program.stdout.readline() for _ in range(3)] == ["ready\n"] * 3
    return Job(hosts, program, time.monotonic())


ENDED_SILENTLY = (
    "ended first, without an error: it was killed, crashed in native code, or called os._exit. "
    + OTHERS
)
# The others fail because of it, in the same collective.
ENDED_EARLY = re.compile(
    r"ended early, with exit code 0 \(os\._exit\)\. Then rank [02] on node[02] failed first: "
    rf"RuntimeError: .*\. {OTHERS}"
)


# Exit codes and exceptions under the other MPIs are in test_failing_rank.py.
@pytest.mark.parametrize(
    ("act", "end", "mpi"),
    [
        ("sys.exit(3)", f"ended first, with exit code 3. {OTHERS}", "openmpi5"),
        ("raise RuntimeError('a bug')", f"failed first: RuntimeError: a bug. {OTHERS}", "openmpi5"),
        *(("os._exit(0)", ENDED_EARLY, mpi) for mpi in MPIS),
        *(("os.kill(os.getpid(), 9)", f"was killed by SIGKILL. {OTHERS}", f) for f in MPIS),
    ],
)
def test_the_rank_that_failed_first_is_named(
    hosts: Cluster, act: str, end: str | re.Pattern[str], mpi: str
) -> None:
    job = start(hosts, act, mpi=mpi)
    verdict = job.end()
    assert job.seconds < 100  # the script would run for 2,000 s
    if isinstance(end, re.Pattern):
        named = "mpiddp: rank 1 on node1 "
        assert verdict.startswith(named), verdict
        assert end.fullmatch(verdict.removeprefix(named)), verdict
        return
    if "SIGKILL" in end and not mpi.startswith("openmpi"):  # Hydra's mpirun does not report signals
        end = ENDED_SILENTLY
    own, _, cause = verdict.partition("\n")
    if 'mpiddp: "signal 9 (Killed)." has a known cause.' in cause:
        # On a loaded machine prterun, now and then, prints the signal and ends with another exit code.
        end = ENDED_SILENTLY
    assert own == f"mpiddp: rank 1 on node1 {end}"


@pytest.mark.parametrize("mpi", ["openmpi5", "mpich"])
def test_a_host_whose_link_is_cut_is_lost(hosts: Cluster, mpi: str) -> None:
    """Its own ranks end too, because they lose the launcher."""
    job = start(hosts, mpi=mpi)
    hosts["node1"].link("down")
    try:
        verdict = job.end()
    finally:
        hosts["node1"].link("up")
    sentence = "lost node1 (rank 1): the host stopped answering."
    assert verdict == f"mpiddp: {sentence} {OTHERS}"
    assert job.seconds < 120  # 15 to notice it, the rest to end mpirun on a slow machine
    assert wait_for(lambda: commands(hosts), [], PATIENCE_S) == []  # sshd and mpirun's daemon there


def test_a_short_network_outage_does_no_harm(hosts: Cluster) -> None:
    job = start(hosts, "sys.exit(3) if step == 200 else exec('pass')")
    hosts["node1"].link("down")
    time.sleep(3)
    hosts["node1"].link("up")
    time.sleep(2)
    assert job.program.poll() is None
    job.kill("node1", "python")
    # After the outage, mpirun may learn of the signal too late to report it.
    assert re.search("rank 1 on node1 (was killed by SIGKILL|ended first)", job.end())


def test_a_killed_daemon_ends_the_job(hosts: Cluster) -> None:
    job = start(hosts)
    job.kill("node1", "prted")
    verdict = job.end()
    assert re.search(
        r"ended at the same moment without an error, as when the MPI daemon|"
        r"rank 1 on node1 ended first, without an error",  # the daemon's own rank
        verdict,
    ), verdict
    assert job.seconds < 100  # the script would run for 2,000 s


def test_a_killed_mpirun_ends_the_job(hosts: Cluster) -> None:
    job = start(hosts)
    rank = next(p for p in hosts["node1"].processes() if "mpiddp run" in p.command)
    environment = hosts["node1"].path(f"/proc/{rank.pid}/environ").read_text()
    secret = re.search("MPIDDP_CONTROL_SECRET=([0-9a-f]{32})", environment)
    assert secret
    assert not [command for command in commands(hosts) if secret[1] in command]
    job.kill("node0", "prterun")
    assert job.end() == "mpiddp: the job failed: mpirun was killed by SIGKILL."
    assert job.seconds < 100  # the script would run for 2,000 s


def test_a_killed_launcher_ends_the_job(hosts: Cluster) -> None:
    job = start(hosts)
    launcher = next(p for p in hosts["node0"].processes() if "mpiddp launch" in p.command)
    hosts["node0"].run(["kill", "-KILL", str(launcher.pid)], check=True)
    job.program.wait(PATIENCE_S)
    assert wait_for(lambda: commands(hosts), []) == []
    job.program.communicate(timeout=PATIENCE_S)


def test_kill_orphans_finds_a_process_by_its_job_id_alone(hosts: Cluster) -> None:
    """A process in its own session, which receives no signal from the launcher."""
    act = "import subprocess; subprocess.Popen(['setsid', 'sleep', '6000']); sys.exit(3)"
    bystander = hosts["node1"].popen(["sleep", "6001"])
    stderr = start(hosts, act).program.communicate(timeout=PATIENCE_S)[1]
    killed = r"mpiddp: killed leftover processes of the job on node1: [1-9]\d*\.\n"
    assert re.search(killed, stderr), stderr
    assert wait_for(lambda: commands(hosts), ["sleep 6001"], PATIENCE_S) == ["sleep 6001"]
    bystander.end()
    bystander.communicate(timeout=PATIENCE_S)


@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (
            "lock = threading.Lock(); lock.acquire(); lock.acquire()",
            "has made no step for 3 s while the others wait at step 11. Its Python stack follows.",
        ),
        (
            "os.kill(os.getpid(), 19)",
            "has made no step for 3 s and does not answer: it is stopped, or stuck in native code. "
            "The others wait at step 11.",
        ),
        (
            "import ctypes; lock = ctypes.create_string_buffer(64); "
            "[ctypes.PyDLL(None).pthread_mutex_lock(lock) for _ in range(2)]",
            "has made no step for 3 s: native code holds its Python interpreter. "
            "The others wait at step 11. Its Python stack follows, innermost call first.",
        ),
    ],
)
def test_a_rank_that_hangs_is_named_with_its_stack(hosts: Cluster, act: str, sentence: str) -> None:
    job = start(hosts, act, "--hang-timeout", "3")
    stderr = job.program.communicate(timeout=PATIENCE_S)[1]
    assert f"mpiddp: rank 1 on node1 {sentence}\n" in stderr, stderr
    # mpirun's own last line may lack a newline.
    assert stderr.endswith("mpiddp: the job hung and was stopped.\n"), stderr
    assert ("lock.acquire(); lock.acquire()" in stderr or 'File "<string>"' in stderr) == (
        "lock" in act
    )
    assert job.program.returncode == 1
    wait_for(lambda: commands(hosts), [], PATIENCE_S)
    assert [host.kill_processes() for host in hosts.hosts] == [[], [], []]


def test_an_mpirun_that_hangs_is_named(hosts: Cluster) -> None:
    """For example because its login on another host hangs, before any rank has started."""
    agent = hosts.shared / "agent"
    agent.write_text("#!/bin/sh\nexec sleep 6000\n")
    agent.chmod(0o755)
    code = (
        "import sys; from mpiddp import cli; from mpiddp.launch.supervise import attempt\n"
        "attempt.START_TIMEOUT_S = 3.0; sys.exit(cli.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "launch", "--mpirun", mpirun_of("openmpi5")]
    command += ["-H", "node0:1,node1:1", str(hosts.shared / "script.py")]
    env = {"PYTHONPATH": str(ROOT), "PRTE_MCA_plm_ssh_agent": str(agent)}
    done = hosts["node0"].run(command, cwd=ROOT, env=env)
    assert done.returncode == 1
    assert (
        "mpiddp: no rank has started in 3 s: mpirun or one of its ssh logins hangs." in done.stderr
    )
    assert [host.kill_processes() for host in hosts.hosts] == [[], [], []]
