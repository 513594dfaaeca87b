"""Deliver signals through a socket, so that one selector waits for them and for other sockets."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@contextmanager
def signals_on_socket() -> Iterator[socket.socket]:
    """A socket that receives one byte, the number, for each of STOP_SIGNALS.

    Signals that were ignored when this process started stay ignored, as SIGHUP under `nohup`.
    """
    numbers = [each for each in STOP_SIGNALS if signal.getsignal(each) != signal.SIG_IGN]
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    # The handler only replaces the signal's default action.
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    wakeup = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    try:
        yield receiver
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, old in before.items():
            signal.signal(number, old)
        receiver.close()
        sender.close()


@contextmanager
def child_exits_on_socket() -> Iterator[None]:
    """Within `signals_on_socket`: the socket also receives a byte when a child exits."""
    before = signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


def stop_is_requested(signals: socket.socket, within_s: float) -> bool:
    """Whether one of STOP_SIGNALS has arrived, or arrives within `within_s`."""
    deadline = time.monotonic() + within_s
    while True:
        signals.settimeout(max(deadline - time.monotonic(), 1e-6))
        try:
            if set(signals.recv(64)) & set(STOP_SIGNALS):
                return True
        except TimeoutError:
            return False
