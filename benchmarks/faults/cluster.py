"""Faults of a job on three hosts, and the outcome that each of them must have.

Every other job may restart and the others may not, so that both outcomes are timed.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.faults.foreign_clients import connect_to_control_channel, connect_to_store
from benchmarks.faults.job import EXIT_S, HOSTS, Job, launch
from benchmarks.faults.table import Run
from benchmarks.harness import MPIS
from mpiddp.drill import injectors
from tests.support.cluster import Cluster, proc
from tests.support.ranks import ROOT

SCRIPT = str(ROOT / "tests" / "jobs" / "faulty.py")
STEPS = 90
EARLIEST, LATEST = 11, 35  # the step of a fault, after the first checkpoint
CUT_S = 3.0
STOPPED_S = 15.0  # longer than the silence after which either side takes the other for lost
OPEN_MPI = ("openmpi5", "openmpi4")
DAEMONS = {"openmpi5": r"\S*prted ", "openmpi4": r"\S*orted "}
MPIRUNS = {"openmpi5": r"\S*prterun ", "openmpi4": r"\S*mpirun "}
RESTARTS = "mpiddp: restarting on"


@dataclass(frozen=True)
class Fault:
    """Rank 1 performs `act` on itself (see tests/jobs/faulty.py), unless `do` acts from outside.

    The acts, and what `do` injects, are those of mpiddp/drill/injectors.py.

    message: a pattern for the launcher's line about the fault; "" if it must print none.
    code: the launcher's exit code without a restart. With a restart it must be 0.
    """

    name: str
    message: str = ""
    act: str = ""
    at: int | None = None  # the step; None for a random one
    do: Callable[[Job], None] | None = None
    undo: Callable[[Job], None] = lambda job: None
    options: Sequence[str] = ()
    starters: Sequence[str] = OPEN_MPI
    code: int = 1
    kills_host: bool = False


def measure(fault: Fault, hosts: Cluster, starter: str, number: int) -> Run:
    """Inject the fault once. In rounds with an odd `number` the job may restart.

    Raises:
        TimeoutError: the job ended or hung before the fault.
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
        if fault.do is None:
            since = _time_of_act(job)
        else:
            job.wait_for_step(at)
            since = time.time()
            fault.do(job)
        done_at = time.time()
        code = job.end()
        if fault.code < 0:  # the job outlives the killed launcher
            while job.processes() and time.time() < done_at + EXIT_S:
                time.sleep(0.02)
        ended_at = time.time()
    finally:
        fault.undo(job)
        orphans = job.kill_orphans()

    restarted_at = next((line.at for line in job.lines if RESTARTS in line.text), None)
    next_attempt_at = done_at if fault.code == 0 else restarted_at or ended_at
    steps = job.steps()
    reached = max((step.number for step in steps if step.at < next_attempt_at), default=0)
    resumed = next((step for step in steps if step.at > next_attempt_at), None)
    own = [line for line in job.lines if "mpiddp: " in line.text]
    named = [line for line in own if fault.message and re.search(fault.message, line.text)]
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
        is_named=bool(named) if fault.message else not own,
        orphans=len(orphans),
        steps_lost=reached - resumed_from,
        said=job.output()[-2000:] + "".join(f"\nleft: {process.command}" for process in orphans),
        load=os.getloadavg()[0],
    )


def _time_of_act(job: Job) -> float:
    acted = job.folder / "fault"
    job.wait_until(lambda: acted.exists() and bool(acted.read_text()), "its fault")
    return float(acted.read_text())


def _kill(host: str, commands: dict[str, str]) -> Callable[[Job], None]:
    """kill -9 for a program whose name depends on the MPI."""

    def do(job: Job) -> None:
        pid = job.pid_of(host, commands[job.starter])
        injectors.kill(job.hosts[host].pid_here(pid))

    return do


def _kill_host(job: Job) -> None:
    host = job.hosts["node1"].pid
    started = proc.start_time(host)
    injectors.kill(host)
    while proc.is_running(host, started):
        time.sleep(0.01)


def _cut(job: Job) -> None:
    injectors.cut_link(job.hosts["node1"].pid)


def _mend(job: Job) -> None:
    injectors.mend_link(job.hosts["node1"].pid)


def _cut_briefly(job: Job) -> None:
    _cut(job)
    time.sleep(CUT_S)
    _mend(job)


def _pull_plug(job: Job) -> None:
    job.hosts["node1"].link("down")


def _put_plug(job: Job) -> None:
    job.hosts["node1"].link("up")


def _verdict(how: str) -> str:
    return f"mpiddp: rank 1 on node1 {how}"


SAME_MOMENT = "node1.* ended at the same moment without an error, as when the MPI daemon"
WITHOUT_ERROR = "ended first, without an error"
NO_STEP = "has made no step for 3 s"
LOST = r"mpiddp: lost node1 \(rank 1\)"
HANG_TIMEOUT = ("--hang-timeout", "3")
TWO_HOSTS = ("--min-hosts", "2")

FAULTS = (
    Fault(
        "a rank: kill -9",
        _verdict(f"(was killed by SIGKILL|{WITHOUT_ERROR})"),
        act="kill",
        starters=MPIS,
    ),
    Fault("a rank: exit 3", _verdict("ended first, with exit code 3"), act="exit 3", starters=MPIS),
    Fault(
        "a rank: exception before the first step",
        _verdict("failed first: RuntimeError: on purpose"),
        act="raise",
        at=0,
        starters=MPIS,
    ),
    Fault(
        "a rank: exception later",
        _verdict("failed first: RuntimeError: on purpose"),
        act="raise",
        starters=MPIS,
    ),
    Fault(
        "a rank: `os._exit(0)`",
        _verdict("ended early, with exit code 0"),
        act="_exit(0)",
        starters=MPIS,
    ),
    # mpirun's exit code shows the signal, unless the error of another rank was faster.
    Fault("a rank: segfault", _verdict(f"(was killed by SIGSEGV|{WITHOUT_ERROR})"), act="crash"),
    Fault(
        "a rank: SIGSTOP",
        _verdict(f"{NO_STEP} and does not answer"),
        act="stop",
        options=HANG_TIMEOUT,
    ),
    Fault(
        "a rank: a lock it holds itself", _verdict(NO_STEP), act="deadlock", options=HANG_TIMEOUT
    ),
    Fault(
        "a rank: native code that keeps the GIL",
        _verdict(f"{NO_STEP}: native code holds its Python interpreter"),
        act="hold the interpreter",
        options=HANG_TIMEOUT,
    ),
    Fault(
        "a rank: killed after its main part",
        _verdict(f"(was killed by SIGKILL|{WITHOUT_ERROR})"),
        act="late kill",
    ),
    Fault(
        "a rank: `os._exit(3)` after its main part",
        _verdict(f"ended first, with exit code 3|{WITHOUT_ERROR}"),
        act="late _exit(3)",
    ),
    Fault(
        "a rank: no answer in an agreement",
        "rank 1 on node1 did not answer in 2 s",
        act="no answer",
    ),
    Fault(
        "SIGTERM, and a save longer than `--grace`",
        "mpiddp: rank 1 on node1 is still saving; waiting for at most 600 s",
        act="slow stop",
        do=lambda job: injectors.send(signal.SIGTERM, job.command_pid()),
        options=("--grace", "1"),
        code=75,
    ),
    Fault(
        "MPI's daemon: kill -9",
        f"{SAME_MOMENT}|{_verdict(WITHOUT_ERROR)}",
        do=_kill("node1", DAEMONS),
    ),
    Fault("mpirun: kill -9", "mpiddp: .*was killed by SIGKILL", do=_kill("node0", MPIRUNS)),
    Fault(
        "the launcher: kill -9",
        do=lambda job: injectors.kill(job.command_pid()),
        code=-signal.SIGKILL,
    ),
    Fault(
        "the launcher: stopped for 15 s",
        do=lambda job: job.stop_for(STOPPED_S, job.command_pid()),
        code=0,
    ),
    Fault(
        "a host's link cut",
        LOST,
        do=_pull_plug,
        undo=_put_plug,
        options=TWO_HOSTS,
    ),
    Fault("a host's link cut for 3 s", do=_cut_briefly, code=0),
    Fault(
        "packets of a host vanish",
        LOST,
        do=_cut,
        undo=_mend,
        options=TWO_HOSTS,
    ),
    Fault(
        "a host killed whole",
        rf"{LOST}|{_verdict(WITHOUT_ERROR)}|{SAME_MOMENT}",
        do=_kill_host,
        options=TWO_HOSTS,
        kills_host=True,
    ),
    Fault("strangers at the job channel", do=connect_to_control_channel, code=0),
    Fault("garbage at the store's port", do=connect_to_store, code=0),
)
