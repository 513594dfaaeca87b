"""Deliver signals through a socket, so that one selector waits for them and for other sockets."""

from __future__ import annotations

import signal
import socket
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

# coreutils' timeout signals its child and then the child's process group, systemd and a closing terminal
# do the like: one request arrives twice. A person who presses Ctrl-C twice takes longer than 0.3 s.
_REPEAT_S = {signal.SIGINT: 0.3}
_DEFAULT_REPEAT_S = 1.0


@dataclass(frozen=True)
class Arrival:
    """A signal, and when it arrived, in time.monotonic()'s seconds."""

    number: int
    at: float


class SignalQueue:
    """The signals that have arrived. Its file descriptor is readable when there are any."""

    def __init__(self, receiver: socket.socket, sender: socket.socket) -> None:
        self._receiver = receiver
        self._sender = sender
        self._arrivals: deque[Arrival] = deque()
        self._first_at: dict[int, float] = {}

    def fileno(self) -> int:
        return self._receiver.fileno()

    def add(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. This reads the clock at once, because the selector's loop may be busy."""
        self._arrivals.append(Arrival(number, time.monotonic()))
        with suppress(BlockingIOError):  # a full socket is readable anyway
            self._sender.send(b".")

    def receive(self) -> list[Arrival]:
        """The new arrivals. A stop signal that only repeats an earlier one is left out."""
        with suppress(BlockingIOError):
            self._receiver.recv(4096)
        arrivals = [self._arrivals.popleft() for _ in range(len(self._arrivals))]
        return [each for each in arrivals if not self._is_repeat(each)]

    def _is_repeat(self, arrival: Arrival) -> bool:
        """Whether an equal signal arrived shortly before. The repeat itself does not prolong that time."""
        if arrival.number not in STOP_SIGNALS:
            return False
        since = arrival.at - self._first_at.get(arrival.number, float("-inf"))
        if since < _REPEAT_S.get(signal.Signals(arrival.number), _DEFAULT_REPEAT_S):
            return True
        self._first_at[arrival.number] = arrival.at
        return False


@contextmanager
def queued_signals() -> Iterator[SignalQueue]:
    """A queue of STOP_SIGNALS.

    Signals that were ignored when this process started stay ignored, as SIGHUP under `nohup`.
    """
    numbers = [each for each in STOP_SIGNALS if signal.getsignal(each) != signal.SIG_IGN]
    receiver, sender = socket.socketpair()
    receiver.setblocking(False)
    sender.setblocking(False)
    queue = SignalQueue(receiver, sender)
    # A signal may reach another thread. Python then runs the handler only after the selector has returned.
    wakeup = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    before = {number: signal.signal(number, queue.add) for number in numbers}
    try:
        yield queue
    finally:
        for number, old in before.items():
            signal.signal(number, old)
        signal.set_wakeup_fd(wakeup)
        receiver.close()
        sender.close()


@contextmanager
def with_child_exits(queue: SignalQueue) -> Iterator[None]:
    """Within the body, the queue also receives a SIGCHLD when a child exits."""
    before = signal.signal(signal.SIGCHLD, queue.add)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


def stop_is_requested(queue: SignalQueue, within_s: float) -> bool:
    """Whether one of STOP_SIGNALS has arrived, or arrives within `within_s`."""
    import select

    deadline = time.monotonic() + within_s
    while True:
        if any(arrival.number in STOP_SIGNALS for arrival in queue.receive()):
            return True
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        select.select([queue], [], [], left_s)
