"""What the launcher waits for: its ranks, signals and timers. And what it asks of the ranks.

The launcher's end of the job channel listens on one address only. `mpiddp.protocol.server` handles the
connections and the protocol.
"""

from __future__ import annotations

import fcntl
import os
import select
import selectors
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from mpiddp.hosts.sockets import OPEN_BESIDES, allow_open
from mpiddp.paths import cause_of
from mpiddp.protocol.messages import UNIX
from mpiddp.protocol.server import PER_RANK, ChannelServer, Message
from mpiddp.protocol.variables import ADDRESS, SECRET

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

# coreutils' timeout signals its child and then the child's process group, systemd and a closing terminal
# do the like: one request arrives twice. A person who presses Ctrl-C twice takes longer than 0.3 s.
_REPEAT_S: dict[int, float] = {signal.SIGINT: 0.3}
_DEFAULT_REPEAT_S = 1.0

_SIOCOUTQ = 0x5411  # bytes that the peer has not acknowledged yet
_LONGEST_WAIT_S = 86400.0  # epoll accepts at most a few weeks


class TimedSelector(selectors.DefaultSelector):
    """A selector with timers. Times are time.monotonic()'s seconds.

    After Ctrl-Z and `fg`, handle what is ready before the timers: the ranks have run on meanwhile.
    """

    def __init__(self) -> None:
        super().__init__()
        self._timers: list[tuple[float, Any]] = []  # times and events, the next one first

    def after(self, seconds: float, event: object) -> None:
        """Let `due` return `event` in so many seconds, and no sooner."""
        self.cancel(event)
        self._timers.append((time.monotonic() + seconds, event))
        self._timers.sort(key=lambda timer: timer[0])

    def cancel(self, *events: object) -> None:
        self._timers = [timer for timer in self._timers if timer[1] not in events]

    def cancel_all(self, but: object) -> None:
        self._timers = [timer for timer in self._timers if timer[1] == but]

    @property
    def next_at(self) -> float:
        """The time of the next timer, infinity without one."""
        return self._timers[0][0] if self._timers else float("inf")

    def ready(self, until: float) -> list[Any]:
        """Wait for files and timers, at most until then. Returns the data of the files that are ready."""
        wait_s = min(until, self.next_at) - time.monotonic()
        return [key.data for key, _ in self.select(min(max(0.0, wait_s), _LONGEST_WAIT_S))]

    def due(self) -> Iterator[Any]:
        """The events of the timers that are over."""
        while self.next_at <= time.monotonic():
            yield self._timers.pop(0)[1]


class SignalQueue:
    """The signals that have arrived. Its file descriptor is readable when there are any.

    The kernel may deliver a signal to another thread. Python then runs no handler before the selector
    returns, but writes the number to `sender` at once.
    """

    def __init__(self) -> None:
        self._receiver, self.sender = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._first_at: dict[int, float] = {}
        self._interrupts = False

    def fileno(self) -> int:
        return self._receiver

    def close(self) -> None:
        os.close(self._receiver)
        os.close(self.sender)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal, whose number is in the queue already."""
        if self._interrupts and number in STOP_SIGNALS:
            raise KeyboardInterrupt

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Within the body, a stop signal raises KeyboardInterrupt: it may block, as logins to hosts do."""
        self._interrupts = True
        try:
            yield
        finally:
            self._interrupts = False

    def receive(self) -> list[int]:
        """The signals that are new. A stop signal that only repeats an equal one is left out."""
        with suppress(BlockingIOError):
            return [each for each in os.read(self._receiver, 4096) if self._is_new(each)]
        return []

    def _is_new(self, number: int) -> bool:
        now = time.monotonic()
        since = now - self._first_at.get(number, float("-inf"))
        if number in STOP_SIGNALS and since < _REPEAT_S.get(number, _DEFAULT_REPEAT_S):
            return False
        self._first_at[number] = now
        return True

    def has_stop(self, within_s: float) -> bool:
        """Whether one of STOP_SIGNALS has arrived, or arrives within `within_s`."""
        deadline = time.monotonic() + within_s
        while not any(number in STOP_SIGNALS for number in self.receive()):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            select.select([self], [], [], left_s)
        return True


@contextmanager
def queued_signals() -> Iterator[SignalQueue]:
    """A queue of STOP_SIGNALS, and of SIGCHLD.

    A signal that was ignored when this process started is still ignored, as SIGHUP under `nohup`.
    """
    queue = SignalQueue()
    numbers = [each for each in STOP_SIGNALS if signal.getsignal(each) != signal.SIG_IGN]
    wakeup = signal.set_wakeup_fd(queue.sender, warn_on_full_buffer=False)
    before = {each: signal.signal(each, queue.handle) for each in (*numbers, signal.SIGCHLD)}
    try:
        yield queue
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        queue.close()


class ControlServer(ChannelServer):
    """The server for `world_size` ranks. It registers with `selector`.

    where: an address of this machine, of which it takes a free port; for ranks on this host only, the path of
    a Unix socket in a folder that only this user can open.
    """

    def __init__(self, where: str | Path, world_size: int, selector: TimedSelector) -> None:
        self.selector = selector
        allow_open(2 * PER_RANK * world_size + OPEN_BESIDES)
        self._is_local = isinstance(where, Path)
        try:
            if isinstance(where, Path):
                self._socket = socket.socket(socket.AF_UNIX)
                self._socket.bind(str(where))
                self._socket.listen(1024)
                shown = f"{UNIX}{where}"
            else:
                family = socket.AF_INET6 if ":" in where else socket.AF_INET
                self._socket = socket.create_server((where, 0), family=family, backlog=1024)
                shown = "{}:{}".format(*self._socket.getsockname()[:2])
        except OSError as error:
            of, hint = " of this machine", " Name another interface: --interface NAME"
            if self._is_local:
                of = hint = ""
            sentence = f"cannot listen on {where}{of} ({error.strerror}).{hint}"
            raise cause_of(error)(sentence) from None
        secret = os.urandom(16).hex()
        super().__init__(self._socket, secret, world_size, selector)
        self.settings = {ADDRESS: shown, SECRET: secret}  # the variables that the ranks need

    def close(self) -> None:
        super().close()
        self._socket.close()

    def request_stacks(self) -> set[int]:
        """Request the stacks of every connected rank: of its script, if that talks to this server itself."""
        for rank in self.connected:
            self.send(rank, "stacks", to_script=rank in self._scripts)
        return self.connected

    def request_stop(self, *ranks: int) -> None:
        """Request a stop of these ranks, as far as they are connected."""
        for rank in ranks:
            if rank in self._scripts:
                self.send(rank, "stop", to_script=True)
            self.send(rank, "stopping" if rank in self._scripts else "stop")

    def drop_silent_hosts(self) -> list[Message]:
        """Drop the ranks whose hosts have not acknowledged over TCP what was sent to them."""
        if self._is_local:  # this host's own kernel always answers
            return []
        silent = [
            peer
            for peer in self._ranks.values()
            if any(fcntl.ioctl(peer.connection, _SIOCOUTQ, bytes(4)))
        ]
        return [message for peer in silent for message in self.lose(peer, silent=True)]
