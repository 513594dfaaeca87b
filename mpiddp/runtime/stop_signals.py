"""Signals that request a stop of a rank, besides the message of its launcher."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from mpiddp.runtime.stop_request import StopRequest


def handle_sigusr1(stop: StopRequest) -> None:
    """Treat SIGUSR1, from mpirun or srun, as a request to stop, unless the script has its own handler.

    The signal is blocked in this thread, and therefore in the processes that it starts: it would kill a
    DataLoader's worker. The failure watch's thread unblocks it.
    """
    main_thread = threading.main_thread() is threading.current_thread()
    if main_thread and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, partial(_on_signal, stop))
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])


def handle_sigterm(stop: StopRequest) -> None:
    """Treat SIGTERM as a request to stop, unless the script has its own handler.

    systemd, batch systems and container runtimes send it to every process of a job at once. The launcher
    gets it too, and limits the time. For the children of this process, see `child_signals`.
    """
    main_thread = threading.main_thread() is threading.current_thread()
    if main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        handler = partial(_on_signal, stop)
        signal.signal(signal.SIGTERM, handler)
        os.register_at_fork(after_in_child=partial(_end_by_sigterm, handler))


def _end_by_sigterm(handler: Callable[[int, Any], None]) -> None:
    """In a forked child, which is no rank, let SIGTERM have its default effect."""
    if signal.getsignal(signal.SIGTERM) is handler:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def unblock_sigusr1() -> None:
    """Receive SIGUSR1 in this thread."""
    with suppress(ValueError):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])


def listen_when_alone(stop: StopRequest) -> None:
    """Treat the first SIGTERM or Ctrl-C as a request to stop too, if there is no launcher."""
    for number in (signal.SIGTERM, signal.SIGINT):
        before = signal.getsignal(number)
        if before in (
            signal.SIG_DFL,
            signal.default_int_handler,
        ):  # keep the handlers of nohup and the like
            signal.signal(number, partial(_on_first_signal, stop, before))


def _on_signal(stop: StopRequest, number: int, frame: Any) -> None:
    stop.is_requested = True


def _on_first_signal(stop: StopRequest, before: Any, number: int, frame: Any) -> None:
    signal.signal(number, before)
    stop.is_requested = True
    name = signal.Signals(number).name
    with suppress(OSError):  # the Ctrl-C may have ended the reader of a pipe as well
        os.write(
            2,
            f"mpiddp: {name}: saving and stopping; another signal kills the training at once.\n".encode(),
        )
