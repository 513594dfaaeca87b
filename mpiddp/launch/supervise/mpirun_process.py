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
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from mpiddp.errors import UserError

ORPHANS_S = 2.0  # for what mpirun left behind to end by itself
KILL_S = 5.0  # for the system to end what was killed: not where a disk or a driver holds it

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class MpirunProcess:
    """One mpirun, on this process's own stdin, stdout and stderr, and all that it starts on this host."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        # Children of the shell that this process may have taken the place of, by exec.
        self._strangers = frozenset(_descendants(os.getpid()))
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            self._process = subprocess.Popen(
                argv,
                env=dict(env),
                stdin=subprocess.DEVNULL if _is_in_background() else None,
                start_new_session=True,
                # Should this process be killed, the job must not go on without anybody to stop it.
                preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0),
            )
        except OSError as error:  # a host list of more than 128 KiB is one
            raise UserError(f"cannot start {argv[0]}: {error.strerror}.") from None

    @property
    def code(self) -> int | None:
        """Its exit code, -N if signal N has killed it; None as long as it runs."""
        return self._process.poll()

    def reap_adopted(self) -> None:
        """Collect the orphans that have ended, for nobody else will."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        with suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, options)) and ended.si_pid != self._process.pid:
                os.waitpid(ended.si_pid, 0)

    def stop(self) -> None:
        """SIGTERM also for a Ctrl-C: Hydra would pass a SIGINT on, and each rank print a traceback.

        The whole group gets it, for Intel's mpirun is a shell around another one.
        """
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)

    def kill_all(self) -> None:
        """Kill all that the job has on this host, whereupon its daemons on other hosts end too."""
        _signal_all(self._left(), signal.SIGKILL)

    def end_orphans(self, grace_s: float) -> list[int]:
        """End what the job has left on this host: politely first, and after `grace_s` for certain.

        Returns what cannot be ended.
        """
        _signal_all(self._left(), signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while (left := self._left()) and time.monotonic() < deadline + KILL_S:
            if time.monotonic() >= deadline:
                _signal_all(left, signal.SIGKILL)
            time.sleep(0.02)
        return left

    def _left(self) -> list[int]:
        return _descendants(os.getpid(), but=self._strangers)


def _is_in_background() -> bool:
    """Whether a shell's `&` is at work: in a session of its own, mpirun would read what is typed there."""
    try:
        return os.tcgetpgrp(0) != os.getpgrp()
    except OSError:  # no terminal
        return False


def _signal_all(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with suppress(OSError):  # it has ended, or is another user's
            os.kill(pid, number)


def _descendants(ancestor: int, but: Collection[int] = ()) -> list[int]:
    """The living processes below `ancestor`, which as their reaper includes every orphan.

    Those of `but` are left out, with all that is below them.
    """
    children: dict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in but:
            with suppress(OSError):  # it has ended, or another user's may not be looked at
                # "pid (name) state ppid …", where the name may be any bytes, parentheses as well
                state, parent = (entry / "stat").read_bytes().rpartition(b")")[2].split()[:2]
                if state != b"Z":
                    children[int(parent)].append(int(entry.name))
    found = [*children[ancestor]]
    for pid in found:
        found += children[pid]
    return found
