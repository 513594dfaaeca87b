"""What the launcher waits with: signals, and a selector with timers."""

from __future__ import annotations

import select
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

# coreutils' timeout signals its child and then the child's process group, systemd and a closing terminal
# do the like: one request arrives twice. A person who presses Ctrl-C twice takes longer than 0.3 s.
_REPEAT_S = {signal.SIGINT: 0.3}
_DEFAULT_REPEAT_S = 1.0

Handler = Callable[[int, FrameType | None], object]


class TimedSelector(selectors.DefaultSelector):
    """A selector with timers. Times are time.monotonic()'s seconds.

    After Ctrl-Z and `fg`, handle what is ready before the timers: the ranks have run on meanwhile.
    """

    def __init__(self) -> None:
        super().__init__()
        self._timers: list[tuple[float, Any]] = []  # times and events, the next one first

    def after(self, seconds: float, event: object) -> None:
        """Let `due` return `event` in so many seconds."""
        self._timers.append((time.monotonic() + seconds, event))
        self._timers.sort(key=lambda timer: timer[0])

    def cancel(self, *events: object) -> None:
        self._timers = [timer for timer in self._timers if timer[1] not in events]

    def clear_timers(self) -> None:
        self._timers.clear()

    @property
    def next_at(self) -> float:
        """The time of the next timer, infinity without one."""
        return self._timers[0][0] if self._timers else float("inf")

    def due(self) -> Iterator[Any]:
        """The events of the timers that are over."""
        while self._timers and self._timers[0][0] <= time.monotonic():
            yield self._timers.pop(0)[1]


class SignalQueue:
    """The signals that have arrived. Its file descriptor is readable when there are any."""

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)
        self._arrived: deque[int] = deque()
        self._first_at: dict[int, float] = {}

    def fileno(self) -> int:
        return self._receiver.fileno()

    def close(self) -> None:
        self._receiver.close()
        self._sender.close()

    def add(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. A stop signal that only repeats an equal one is left out, and prolongs no time.

        This reads the clock at once, because the selector's loop may be busy.
        """
        if number in STOP_SIGNALS:
            now = time.monotonic()
            since = now - self._first_at.get(number, float("-inf"))
            if since < _REPEAT_S.get(signal.Signals(number), _DEFAULT_REPEAT_S):
                return
            self._first_at[number] = now
        self._arrived.append(number)
        with suppress(BlockingIOError):  # a full socket is readable anyway
            self._sender.send(b".")

    def receive(self) -> list[int]:
        """The signals that are new."""
        with suppress(BlockingIOError):
            self._receiver.recv(4096)
        return [self._arrived.popleft() for _ in range(len(self._arrived))]

    def has_stop(self, within_s: float) -> bool:
        """Whether one of STOP_SIGNALS has arrived, or arrives within `within_s`."""
        deadline = time.monotonic() + within_s
        while True:
            if any(number in STOP_SIGNALS for number in self.receive()):
                return True
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            select.select([self], [], [], left_s)


@contextmanager
def queued_signals() -> Iterator[SignalQueue]:
    """A queue of STOP_SIGNALS, and of SIGCHLD.

    Signals that were ignored when this process started stay ignored, as SIGHUP under `nohup`.
    """
    queue = SignalQueue()
    numbers = [each for each in STOP_SIGNALS if signal.getsignal(each) != signal.SIG_IGN]
    # A signal may reach another thread. Python then runs the handler only after the selector has returned.
    wakeup = signal.set_wakeup_fd(queue._sender.fileno(), warn_on_full_buffer=False)
    with _handled_by(queue.add, [*numbers, signal.SIGCHLD]):
        try:
            yield queue
        finally:
            signal.set_wakeup_fd(wakeup)
            queue.close()


@contextmanager
def interrupting(queue: SignalQueue) -> Iterator[None]:
    """Within the body, a stop signal raises KeyboardInterrupt: what it does may block, as logins to hosts."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        queue.add(number, frame)
        raise KeyboardInterrupt

    with _handled_by(interrupt, [n for n in STOP_SIGNALS if signal.getsignal(n) == queue.add]):
        yield


@contextmanager
def _handled_by(handler: Handler, numbers: Sequence[int]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
