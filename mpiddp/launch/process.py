"""Runs mpirun to its end: passes signals on, and leaves no process of the job on this host.

mpirun gets a session of its own, so that a Ctrl-C reaches it once, from here. This process adopts
whatever mpirun leaves behind, so that nothing gets lost between its end and ours.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

STOP_S = 5.0  # for mpirun to stop its ranks, which Open MPI 4.1 takes up to 4 s for
SWEEP_S = 2.0  # for what mpirun left behind to end by itself

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True)
class End:
    """How mpirun ended: its code (-N when signal N killed it), and whether we were told to stop."""

    code: int
    interrupted: bool


def run_to_the_end(argv: Sequence[str], env: Mapping[str, str]) -> End:
    """Run `argv` on this process's own stdin, stdout and stderr until it ends.

    The first SIGINT, SIGTERM or SIGHUP stops the job as mpirun does it. The second, or STOP_S
    seconds, kills all that the job has on this host, whereupon its daemons on other hosts end too.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    mpirun: subprocess.Popen[bytes] | None = None
    stops: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        stops.append(number)
        if mpirun is not None and len(stops) == 1:
            _stop(mpirun)
        elif mpirun is not None:
            _signal_all(_descendants(os.getpid()), signal.SIGKILL)

    with _handled(stop):
        mpirun = subprocess.Popen(
            argv,
            env=dict(env),
            start_new_session=True,
            # Should this process be killed, the job must not go on without anybody to stop it.
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0),
        )
        if stops:  # one came before there was anything to stop
            _stop(mpirun)
        code = mpirun.wait()
        signal.alarm(0)
        _sweep(0.0 if len(stops) > 1 else SWEEP_S)
    return End(code, interrupted=bool(stops))


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _stop(mpirun: subprocess.Popen[bytes]) -> None:
    """SIGTERM also for a Ctrl-C: Hydra would pass a SIGINT on, and each rank print a traceback.

    The whole group gets it, for Intel's mpirun is a shell around another one. A rank that hangs in a
    collective hears nothing, hence the alarm.
    """
    with suppress(ProcessLookupError):
        os.killpg(mpirun.pid, signal.SIGTERM)
    signal.setitimer(signal.ITIMER_REAL, STOP_S)


def _sweep(grace_s: float) -> None:
    """End what the job has left on this host: politely first, and after `grace_s` for certain."""
    _signal_all(_descendants(os.getpid()), signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while left := _descendants(os.getpid()):
        if time.monotonic() >= deadline:
            _signal_all(left, signal.SIGKILL)
        time.sleep(0.02)


def _signal_all(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _descendants(ancestor: int) -> list[int]:
    """The living processes below `ancestor`, which as their reaper includes every orphan."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):
                # "pid (name) state ppid …", where the name may hold spaces and parentheses itself
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    children[int(parent)].append(int(entry.name))
    found = [*children[ancestor]]
    for pid in found:
        found += children[pid]
    return found
