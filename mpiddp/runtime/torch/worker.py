"""`mpiddp.init_worker`: a DataLoader's worker leaves a stop to its rank, and ends with it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from mpiddp.hosts.processes import fact_of

_SIGTERM = {signal.SIGTERM}
_LOOK_S = 1.0  # between two looks whether the rank lives


def init_worker(worker_id: int) -> None:
    """Let a worker live until its rank ends it: the `worker_init_fn` of a DataLoader.

        DataLoader(dataset, num_workers=4, worker_init_fn=mpiddp.init_worker)

    A batch system sends SIGTERM to every process of a job. A worker that it ended would fail its rank, which
    may still save. So a worker ignores SIGINT and SIGUSR1, and SIGTERM unless its rank sends it. It ends once
    its rank has ended, also under a forkserver, which would not tell it. The programs and processes that it
    starts get all signals.

    Args:
        worker_id: which a DataLoader passes; it is not used.
    """
    rank, popen = multiprocessing.parent_process(), subprocess.Popen
    assert rank is not None
    popen._execute_child = _with_sigterm(popen._execute_child)  # type: ignore[attr-defined]
    for name in ("system", "posix_spawn", "posix_spawnp"):
        setattr(os, name, _with_sigterm(getattr(os, name)))
    os.register_at_fork(after_in_child=partial(_as_usual, os.getpid()))
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)  # SIG_IGN would reach its programs
    # While a program starts, nobody can tell who sends a SIGTERM, so this process repeats it.
    signal.signal(signal.SIGTERM, lambda number, _: os.kill(os.getpid(), number))
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGTERM)  # later threads inherit the mask
    threading.Thread(target=_end_with, args=(rank.pid,), daemon=True).start()


def _with_sigterm(start: Callable[..., Any]) -> Callable[..., Any]:
    """A function that starts a program, which would inherit the mask of this thread."""

    @wraps(start)
    def start_with_sigterm(*args: Any, **options: Any) -> Any:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGTERM)
        try:
            return start(*args, **options)
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, _SIGTERM)

    return start_with_sigterm


def _as_usual(worker: int) -> None:
    """Let a process that the worker has forked, as multiprocessing does, end by each signal."""
    if os.getppid() == worker:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGTERM)


def _end_with(rank: int) -> None:
    """End this worker at its rank's own SIGTERM, which `terminate()` sends, or once the rank has ended."""
    while fact_of(
        rank, "cmdline"
    ):  # it is empty once the rank has ended; not every Python has pidfd_open
        received = signal.sigtimedwait(_SIGTERM, _LOOK_S)
        if received is not None and received.si_pid in (rank, os.getpid()):
            break
    os._exit(0)
