"""Signals in a child of a rank: a stop reaches a whole process group, but the rank may save first.

A child, such as a DataLoader's worker, then exits only on its own rank's SIGTERM, which `terminate()` sends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading


def obey_only(rank: int) -> None:
    """Ignore a SIGTERM in this process unless the process `rank` sends it, or no longer exists.

    A handler that the child itself installs gets every SIGTERM.
    """
    inherited = signal.getsignal(signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # later threads inherit the mask
    threading.Thread(target=_obey, args=(rank, inherited), daemon=True).start()


def _obey(rank: int, inherited: object) -> None:
    while True:
        sender = signal.sigwaitinfo({signal.SIGTERM}).si_pid
        has_own_handler = signal.getsignal(signal.SIGTERM) is not inherited
        if has_own_handler or sender == rank or not _exists(rank):
            break
    if not has_own_handler and _is_loader_worker():
        os._exit(0)  # as torch's own handler of SIGTERM does; its rank would report another end
    if not has_own_handler:
        # Only the main thread may call signal.signal, and it may be busy.
        ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(0))  # SIG_DFL
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.kill(os.getpid(), signal.SIGTERM)


def _is_loader_worker() -> bool:
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
