"""`mpiddp.init_worker`: a DataLoader's worker leaves a stop to its rank, and ends with it."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import select
import signal
import subprocess
import threading
from collections.abc import Callable
from typing import Any

_SIGTERM = {signal.SIGTERM}
_LOOK_S = 1.0  # between two looks whether the rank lives


def init_worker(worker_id: int) -> None:
    """Let a worker live until its rank ends it: the `worker_init_fn` of a DataLoader.

        DataLoader(dataset, num_workers=4, worker_init_fn=mpiddp.init_worker)

    A batch system sends SIGTERM to every process of a job. A worker that it ended would fail its rank, which
    may still save. So a worker ignores SIGINT and SIGUSR1, and SIGTERM unless its rank sends it. It ends once
    its rank has ended, also under a forkserver, which would not tell it. The programs that it starts by
    subprocess get all signals.

    Args:
        worker_id: which a DataLoader passes; it is not used.
    """
    rank = multiprocessing.parent_process()
    assert rank is not None
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGTERM)  # later threads inherit the mask
    # While a program starts, nobody can tell who sends the signal, so this process repeats it.
    signal.signal(signal.SIGTERM, lambda number, _: os.kill(os.getpid(), number))
    subprocess.Popen._execute_child = _with_sigterm(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
    threading.Thread(target=_end_with, args=(rank.pid,), daemon=True).start()


def _with_sigterm(start: Callable[..., None]) -> Callable[..., None]:
    """`start`, which lets the program that it starts receive SIGTERM: the mask outlives exec."""

    @functools.wraps(start)
    def start_program(*args: Any, **options: Any) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGTERM)
        try:
            start(*args, **options)
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, _SIGTERM)

    return start_program


def _end_with(rank: int) -> None:
    """End this worker at its rank's own SIGTERM, which `terminate()` sends, or once the rank has ended."""
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        ended = os.pidfd_open(rank)
        poll = select.poll()  # select() refuses high numbers of files
        poll.register(ended, select.POLLIN)
        while not poll.poll(0):
            received = signal.sigtimedwait(_SIGTERM, _LOOK_S)
            if received is not None and received.si_pid in (rank, os.getpid()):
                break
    os._exit(0)
