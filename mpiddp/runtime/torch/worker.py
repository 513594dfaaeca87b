"""`mpiddp.init_worker`: a DataLoader's worker leaves a stop to its rank, and ends with it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import threading

_LOOK_S = 1.0  # between two looks whether the rank lives


def init_worker(worker_id: int) -> None:
    """Let a worker live until its rank ends it: the `worker_init_fn` of a DataLoader.

        DataLoader(dataset, num_workers=4, worker_init_fn=mpiddp.init_worker)

    A batch system sends SIGTERM to every process of a job. A worker that it ended would fail its rank, which
    may still save. So a worker ignores SIGINT and SIGUSR1, and SIGTERM unless its rank sends it. It ends once
    its rank has ended, also under a forkserver, which would not tell it.

    Args:
        worker_id: which a DataLoader passes; it is not used.
    """
    rank = multiprocessing.parent_process()
    assert rank is not None
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # later threads inherit the mask
    threading.Thread(target=_end_with, args=(rank.pid,), daemon=True).start()


def _end_with(rank: int) -> None:
    """End this worker at its rank's own SIGTERM, which `terminate()` sends, or once the rank has ended."""
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        ended = os.pidfd_open(rank)
        while not select.select([ended], [], [], 0)[0]:
            received = signal.sigtimedwait({signal.SIGTERM}, _LOOK_S)
            if received is not None and received.si_pid == rank:
                break
    os._exit(0)
