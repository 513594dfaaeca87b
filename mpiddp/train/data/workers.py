"""Signals in a DataLoader's workers: a stop reaches a whole process group, but the rank may save first.

A worker therefore exits only on its own rank's SIGTERM, which `terminate()` sends.
"""

from __future__ import annotations

import os
import signal
import threading


def obey_only(rank: int, worker: int) -> None:
    """Initialize a worker. `rank` is the pid of its rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # later threads inherit the mask
    threading.Thread(target=_exit_on_sigterm, args=(rank,), daemon=True).start()


def _exit_on_sigterm(rank: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank and _exists(rank):
        pass
    os._exit(0)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
