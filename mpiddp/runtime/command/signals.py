"""The signals that a rank passes on to its command, and how they arrive in a process that waits."""

from __future__ import annotations

import signal
import socket
from collections.abc import Sequence
from typing import Any

# SIGCONT follows SIGTSTP.
PASSED = (
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1),
    *(signal.SIGUSR2, signal.SIGTSTP, signal.SIGCONT),
)


class SignalWakeup:
    """Within the body, signals that were not ignored arrive on a socket, each as a byte with its number."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers
        self._before: dict[int, Any] = {}

    def __enter__(self) -> socket.socket:
        self.receiver, self._sender = socket.socketpair()
        self.receiver.setblocking(False)
        self._sender.setblocking(False)
        self._previous = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        for number in self._numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, lambda number, frame: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._before)
        return self.receiver

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous)
        self.receiver.close()
        self._sender.close()
