"""What is done to a job on three hosts, and what has to come of it.

Every other job may be started again, the others may not: so both ends are timed.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.faults.job import HOSTS, SETTLE_S, Job, launch
from benchmarks.faults.strangers import at_the_channel, at_the_store
from benchmarks.faults.table import Run
from tests.cluster import Cluster, proc
from tests.cluster.host import configure
from tests.mpis import PACKAGES
from tests.ranks import ROOT

SCRIPT = str(ROOT / "tests" / "jobs" / "faulty.py")
STEPS = 90
EARLIEST, LATEST = 11, 35  # the step of a fault: there is a checkpoint already
CUT_S = 3.0
OPEN_MPI = ("openmpi5", "openmpi4")
EVERY = ("openmpi5", *PACKAGES)
DAEMONS = {"openmpi5": r"\S*prted ", "openmpi4": r"\S*orted "}
MPIRUNS = {"openmpi5": r"\S*prterun ", "openmpi4": r"\S*mpirun "}
RESTARTS = "mpiddp: restarting on"


@dataclass(frozen=True)
class Fault:
    """`act` is what rank 1 does to itself (see tests/jobs/faulty.py), else `do` is done from outside.

    says: what the launcher's sentence matches; "" where there is nothing to say.
    code: the launcher's own without a restart; with one it is 0 in the end.
    """

    name: str
    says: str = ""
    act: str = ""
    at: int | None = None  # the step; None: a random one
    do: Callable[[Job], None] = lambda job: None
    undo: Callable[[Job], None] = lambda job: None
    options: Sequence[str] = ()
    starters: Sequence[str] = OPEN_MPI
    code: int = 1
    ends_host: bool = False


def measure(fault: Fault, hosts: Cluster, starter: str, number: int) -> Run:
    """Do it once; in an odd `number` of round the job may be started again.

    Raises:
        TimeoutError: the job did not come as far as the fault.
    """
    may_restart = bool(number % 2) and fault.code == 1
    folder = hosts.shared / f"job-{os.urandom(4).hex()}"
    at = random.randint(EARLIEST, LATEST) if fault.at is None else fault.at
    options = ["--max-restarts", str(int(may_restart)), *fault.options]
    job = launch(
        hosts,
        folder,
        starter,
        HOSTS,
        options,
        [SCRIPT, str(folder), str(STEPS), fault.act, str(at)],
    )
    try:
        if fault.act:
            since = _time_of_act(job)
        else:
            job.await_step(at)
            since = time.time()
            fault.do(job)
        done_at = time.time()
        code = job.end()
        if fault.code < 0:  # the launcher's own end is not that of the job
            while job.left() and time.time() < done_at + SETTLE_S:
                time.sleep(0.02)
        ended_at = time.time()
    finally:
        fault.undo(job)
        orphans = job.kill_orphans()

    restarted_at = next((line.at for line in job.lines if RESTARTS in line.text), None)
    next_try_at = done_at if fault.code == 0 else restarted_at or ended_at
    steps = job.steps()
    reached = max((step.number for step in steps if step.at < next_try_at), default=0)
    resumed = next((step for step in steps if step.at > next_try_at), None)
    own = [line for line in job.lines if "mpiddp: " in line.text]
    named = [line for line in own if fault.says and re.search(fault.says, line.text)]
    resumed_from = job.newest_checkpoint()
    if resumed is not None:
        resumed_from = reached if fault.code == 0 else resumed.first
    return Run(
        fault.name,
        starter,
        number,
        detected_s=named[0].at - since if named else None,
        ended_s=ended_at - since if fault.code != 0 and restarted_at is None else None,
        resumed_s=resumed.at - since if resumed else None,
        code=code,
        is_code_right=code == (0 if may_restart else fault.code),
        is_named=bool(named) if fault.says else not own,
        orphans=len(orphans),
        steps_lost=reached - resumed_from,
        said=job.said()[-2000:] + "".join(f"\nleft: {process.command}" for process in orphans),
        load=os.getloadavg()[0],
    )


def _time_of_act(job: Job) -> float:
    acted = job.folder / "fault"
    job.await_that(lambda: acted.exists() and bool(acted.read_text()), "its fault")
    return float(acted.read_text())


def _kill(host: str, commands: dict[str, str]) -> Callable[[Job], None]:
    """kill -9 for a program that each MPI calls otherwise."""

    def do(job: Job) -> None:
        pid = job.pid_of(host, commands[job.starter])
        job.hosts[host].run(["kill", "-KILL", str(pid)], check=True)

    return do


def _kill_host(job: Job) -> None:
    pid = job.hosts["node1"].pid
    proc.kill_and_wait(pid, proc.start_time(pid))


def _switch(change: str) -> Callable[[Job], None]:
    """What becomes of node1's end of its cable at the switch."""

    def do(job: Job) -> None:
        host = job.hosts["node1"]
        configure(host.hub_pid, [f"link set {host.port} {change}"])

    return do


def _short_cut(job: Job) -> None:
    _switch("down")(job)
    time.sleep(CUT_S)
    _switch("up")(job)


def _named(how: str) -> str:
    return f"mpiddp: rank 1 on node1 {how}"


AT_ONCE = "node1.* ended at the same moment without an error, as when the MPI daemon"
WORDLESS = "ended first, without an error"
HANGS = "has made no step for 3 s"
LOST = r"mpiddp: lost node1 \(rank 1\)"
WATCHED = ("--hang-timeout", "3")
WITHOUT_ONE = ("--min-hosts", "2")

FAULTS = (
    Fault(
        "a rank: kill -9",
        _named(f"(was killed by SIGKILL|{WORDLESS})"),
        act="kill",
        starters=EVERY,
    ),
    Fault("a rank: exit 3", _named("ended first, with exit code 3"), act="exit 3", starters=EVERY),
    Fault(
        "a rank: exception before the first step",
        _named("failed first: RuntimeError: on purpose"),
        act="raise",
        at=0,
        starters=EVERY,
    ),
    Fault(
        "a rank: exception later",
        _named("failed first: RuntimeError: on purpose"),
        act="raise",
        starters=EVERY,
    ),
    Fault("a rank: `os._exit(0)`", _named(WORDLESS), act="_exit(0)", starters=EVERY),
    Fault("a rank: segfault", _named("was killed by SIGSEGV"), act="crash"),
    Fault("a rank: SIGSTOP", _named(f"{HANGS} and does not answer"), act="stop", options=WATCHED),
    Fault("a rank: a lock it holds itself", _named(HANGS), act="deadlock", options=WATCHED),
    Fault(
        "a rank: native code that keeps the GIL",
        _named(f"{HANGS}: native code holds its Python interpreter"),
        act="hold the interpreter",
        options=WATCHED,
    ),
    Fault(
        "MPI's daemon: kill -9",
        f"{AT_ONCE}|{_named(WORDLESS)}",
        do=_kill("node1", DAEMONS),
    ),
    Fault("mpirun: kill -9", "mpiddp: .*was killed by SIGKILL", do=_kill("node0", MPIRUNS)),
    Fault("the launcher: kill -9", do=lambda job: job.launcher.kill(), code=-signal.SIGKILL),
    Fault(
        "a host's link cut",
        LOST,
        do=_switch("down"),
        undo=_switch("up"),
        options=WITHOUT_ONE,
    ),
    Fault("a host's link cut for 3 s", do=_short_cut, code=0),
    Fault(
        "packets of a host vanish",
        LOST,
        do=_switch("nomaster"),
        undo=_switch("master switch"),
        options=WITHOUT_ONE,
    ),
    Fault(
        "a host killed whole",
        rf"{LOST}|{_named(WORDLESS)}|{AT_ONCE}",
        do=_kill_host,
        options=WITHOUT_ONE,
        ends_host=True,
    ),
    Fault("strangers at the control channel", do=at_the_channel, code=0),
    Fault("garbage at the store's port", do=at_the_store, code=0),
)
