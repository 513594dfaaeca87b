"""mpirun and what it starts on this host: started, stopped, and nothing of it left.

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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

SWEEP_S = 2.0  # for what mpirun left behind to end by itself

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def start(argv: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start mpirun on this process's own stdin, stdout and stderr."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    return subprocess.Popen(
        argv,
        env=dict(env),
        start_new_session=True,
        # Should this process be killed, the job must not go on without anybody to stop it.
        preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0),
    )


def stop(mpirun: subprocess.Popen[bytes]) -> None:
    """SIGTERM also for a Ctrl-C: Hydra would pass a SIGINT on, and each rank print a traceback.

    The whole group gets it, for Intel's mpirun is a shell around another one.
    """
    with suppress(ProcessLookupError):
        os.killpg(mpirun.pid, signal.SIGTERM)


def kill_all() -> None:
    """Kill all that the job has on this host, whereupon its daemons on other hosts end too."""
    _signal_all(_descendants(os.getpid()), signal.SIGKILL)


def sweep(grace_s: float) -> None:
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
