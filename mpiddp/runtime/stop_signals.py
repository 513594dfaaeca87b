"""Signals that ask a rank to stop, besides its launcher's message."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from functools import partial
from typing import Any

from mpiddp.runtime.stop_request import StopRequest


def listen_to_sigusr1(stop: StopRequest) -> None:
    """Take SIGUSR1, from mpirun or srun, as a request to stop, unless the script has its own handler.

    It is blocked in this thread, and so in the processes that it starts: a DataLoader's worker would
    die of it. The failure watch's thread unblocks it.
    """
    main_thread = threading.main_thread() is threading.current_thread()
    if main_thread and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, partial(_on_signal, stop))
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])


def unblock_sigusr1() -> None:
    """Let the signal in by way of this thread."""
    with suppress(ValueError):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])


def listen_when_alone(stop: StopRequest) -> None:
    """Without a launcher that would ask: take the first SIGTERM or Ctrl-C as a request as well."""
    for number in (signal.SIGTERM, signal.SIGINT):
        before = signal.getsignal(number)
        if before in (signal.SIG_DFL, signal.default_int_handler):  # nohup and the like stay
            signal.signal(number, partial(_on_first_signal, stop, before))


def _on_signal(stop: StopRequest, number: int, frame: Any) -> None:
    stop.is_requested = True


def _on_first_signal(stop: StopRequest, before: Any, number: int, frame: Any) -> None:
    signal.signal(number, before)
    stop.is_requested = True
    name = signal.Signals(number).name
    with suppress(OSError):  # a pipe's reader may have got the Ctrl-C as well
        os.write(2, f"mpiddp: {name}: saving; another signal ends it at once.\n".encode())
