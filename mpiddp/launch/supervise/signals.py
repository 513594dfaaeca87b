"""What the launcher waits with: signals, and a selector with timers whose clock stands still under Ctrl-Z."""

from __future__ import annotations

import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NamedTuple

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

# coreutils' timeout signals its child and then the child's process group, systemd and a closing terminal
# do the like: one request arrives twice. A person who presses Ctrl-C twice takes longer than 0.3 s.
_REPEAT_S = {signal.SIGINT: 0.3}
_DEFAULT_REPEAT_S = 1.0


_STOPPED_S = 2.0  # a wait that takes so much longer than requested was a stop


class AwakeSelector(selectors.DefaultSelector):
    """A selector with timers, whose clock stands still while this process is stopped, as by Ctrl-Z.

    The ranks run on meanwhile, and their messages wait in the sockets. So after `fg`, no time limit must
    have passed merely because this process has read nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stopped_s = 0.0
        self._returned_at = time.monotonic()
        self._timers: list[tuple[float, Any]] = []  # times and events, the next one first

    def now(self) -> float:
        """Seconds, from an arbitrary start."""
        return time.monotonic() - self._stopped_s

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait at most `timeout` seconds. The time by which this returns late does not count."""
        ready = super().select(timeout)
        now = time.monotonic()
        if timeout is not None:
            late_s = now - self._returned_at - timeout
            self._stopped_s += late_s if late_s > _STOPPED_S else 0.0
        self._returned_at = now
        return ready

    def after(self, seconds: float, event: object) -> None:
        """Let `due` return `event` in so many seconds."""
        self._timers.append((self.now() + seconds, event))
        self._timers.sort(key=lambda timer: timer[0])

    def cancel(self, *events: object) -> None:
        self._timers = [timer for timer in self._timers if timer[1] not in events]

    def clear_timers(self) -> None:
        self._timers.clear()

    @property
    def next_in_s(self) -> float:
        """Seconds until the next timer, infinity without one."""
        return self._timers[0][0] - self.now() if self._timers else float("inf")

    def due(self) -> Iterator[Any]:
        """The events of the timers that are over."""
        while self._timers and self._timers[0][0] <= self.now():
            yield self._timers.pop(0)[1]


class Arrival(NamedTuple):
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
def interrupting(queue: SignalQueue) -> Iterator[None]:
    """Within the body, a stop signal raises KeyboardInterrupt: what it does may block, as logins to hosts."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        queue.add(number, frame)
        raise KeyboardInterrupt

    numbers = [each for each in STOP_SIGNALS if signal.getsignal(each) == queue.add]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


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
