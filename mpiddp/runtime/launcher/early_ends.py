"""Let Python's `os._exit(0)` and `os.exec…` tell the launcher what becomes of this rank.

Programs end by `os._exit` to skip slow destructors, and start themselves again by `os.execv` to set a
variable of OpenMP or of an allocator. No handler of atexit runs then, and without a report a rank counts as
killed. Only a process's parent learns its exit code. A rank's is a daemon of MPI or Slurm, and not all tell.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any, NoReturn

from mpiddp.errors import DONE
from mpiddp.runtime.job.session import Session


def report_early_ends(session: Session, *, drains: bool) -> None:
    """Put functions that report first in the place of these.

    Args:
        drains: the output has to be with the launcher before this process ends.
    """
    end_process = os._exit

    def _exit(status: int) -> NoReturn:
        if status == DONE and session.is_of_this_process:
            with contextlib.suppress(Exception):
                session.exit_early()
                if session.output is not None and drains:
                    session.output.drain()
        end_process(status)

    os._exit = _exit
    os.execv, os.execve = _reporting(session, os.execv), _reporting(session, os.execve)


def _reporting(
    session: Session, replace_process: Callable[..., NoReturn]
) -> Callable[..., NoReturn]:
    """All functions of the family call one of these two."""

    def replace(*args: Any) -> NoReturn:
        if not session.is_of_this_process:
            replace_process(*args)
        with session.replaced():
            # The other program would inherit what this one's handler needs.
            blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
            try:
                replace_process(*args)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    return replace
