"""Signals in a DataLoader's workers: a stop reaches all of a process group, and its rank may save first.

So a worker heeds nobody but its rank, whose `terminate()` is a SIGTERM as well.
"""

from __future__ import annotations

import os
import signal
import threading


def heed_only(rank: int, worker: int) -> None:
    """To be called in each worker as it begins; `rank` is the pid of the rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # of threads to come, too
    threading.Thread(target=_await_end, args=(rank,), daemon=True).start()


def _await_end(rank: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank and _is_there(rank):
        pass
    os._exit(0)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
