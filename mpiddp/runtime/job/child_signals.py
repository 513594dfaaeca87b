"""Signals in a child of a rank: a stop reaches a whole process group, but the rank may save first.

A child, such as a DataLoader's worker, then exits only on its own rank's SIGTERM, which `terminate()` sends.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

# The signals that a rank passes on to its command. SIGCONT follows SIGTSTP.
PASSED = frozenset(
    {
        *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1),
        *(signal.SIGUSR2, signal.SIGTSTP, signal.SIGCONT),
    }
)
AGAIN_S = 5.0  # a child that handles SIGTERM itself has so long for that
_THREAD = "SIGTERM of a rank's child"


def leave_sigterm_to_rank() -> None:
    """From now on, processes that multiprocessing forks from this rank leave a stranger's SIGTERM to it.

    They do so only while the rank handles SIGTERM itself, so a SIGTERM to every process ends a script that
    cannot stop, and its children with it. Processes of os.fork or subprocess are not affected: the program
    that they may execute would inherit the blocked signal.
    """
    from multiprocessing import util

    util.register_after_fork(_obey_parent, _obey_parent)
    end_children_at_exit()


def end_children_at_exit() -> None:
    """At the end of this process, send SIGTERM to the daemons of multiprocessing until they have ended.

    multiprocessing sends it once and then waits for ever. The kernel drops it where a stranger's SIGTERM has
    just arrived, which the child leaves to its rank.
    """
    import multiprocessing.util  # noqa: F401 - its handler of atexit comes after those registered later

    atexit.unregister(_end_children)
    atexit.register(_end_children)


def _end_children() -> None:
    import multiprocessing

    left = [child for child in multiprocessing.active_children() if child.daemon]
    while left:
        for child in left:
            child.terminate()
        ends_at = time.monotonic() + AGAIN_S
        for child in left:
            child.join(max(0.0, ends_at - time.monotonic()))
        left = [child for child in left if child.is_alive()]


def _obey_parent(_: object) -> None:
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        obey_only(os.getppid(), while_it_handles=True)


def obey_only(rank: int, *, while_it_handles: bool = False) -> None:
    """Ignore a SIGTERM in this process unless the process `rank` sends it, or no longer exists.

    A handler that the child itself installs gets every SIGTERM.

    Args:
        while_it_handles: ignore it only while a SIGTERM does not end the process `rank` either.
    """
    if any(thread.name == _THREAD for thread in threading.enumerate()):
        return
    inherited = signal.getsignal(signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # later threads inherit the mask
    is_left_to = _survives_sigterm if while_it_handles else _exists
    arguments = (rank, is_left_to, inherited)
    threading.Thread(target=_obey, args=arguments, name=_THREAD, daemon=True).start()


def _obey(rank: int, is_left_to: Callable[[int], bool], inherited: object) -> None:
    while True:
        sender = signal.sigwaitinfo({signal.SIGTERM}).si_pid
        has_own_handler = signal.getsignal(signal.SIGTERM) is not inherited
        if has_own_handler or sender == rank or not is_left_to(rank):
            break
    if not has_own_handler and sender == rank and _is_loader_worker():
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


def _survives_sigterm(pid: int) -> bool:
    """Whether the process exists, and handles or blocks SIGTERM: a child of a rank blocks it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    masks = dict(line.split(":\t", 1) for line in lines if line.startswith(("SigBlk", "SigCgt")))
    return any(int(mask, 16) >> (signal.SIGTERM - 1) & 1 for mask in masks.values())
