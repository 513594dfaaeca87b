"""Which of several equal or different signals count.

Tests mpiddp/launch/control.py, mpiddp/runtime/job/session.py.
python -m pytest tests/unit/launch/test_signal_counts.py
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from mpiddp.launch.control import SignalQueue

ROOT = Path(__file__).parents[3]
Received = Callable[[int, list[float]], list[float]]


@pytest.fixture
def queue() -> Iterator[SignalQueue]:
    with closing(SignalQueue()) as queue:
        yield queue


@pytest.fixture
def received(queue: SignalQueue, monkeypatch: pytest.MonkeyPatch) -> Received:
    """The times of the arrivals that count, of signals that arrive at some times."""

    def arrived(number: int, at: float) -> bool:
        monkeypatch.setattr("mpiddp.launch.control.time.monotonic", lambda: at)
        os.write(queue.sender, bytes([number]))
        return queue.receive() == [number]

    return lambda number, times: [at for at in times if arrived(number, at)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_equal_signals_within_a_second_of_the_first_are_one(
    received: Received, number: int
) -> None:
    """The second does not slide: 0.9 s after 0.9 s is more than a second after the first."""
    assert received(number, [10.0, 10.0, 10.9, 11.8, 12.0, 13.0]) == [10.0, 11.8, 13.0]


def test_two_ctrl_c_0_3_s_apart_always_count(received: Received) -> None:
    assert received(signal.SIGINT, [10.0, 10.001, 10.301, 10.7]) == [10.0, 10.301, 10.7]
