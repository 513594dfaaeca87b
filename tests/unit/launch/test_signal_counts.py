"""Which of several equal or different signals count.

Tests mpiddp/launch/control.py, mpiddp/runtime/job/stop.py.
python -m pytest tests/unit/launch/test_signal_counts.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mpiddp.launch.control import SignalQueue, queued_signals
from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).parents[3]
Received = Callable[[int, list[float]], list[float]]


@pytest.fixture
def queue() -> Iterator[SignalQueue]:
    with queued_signals() as queue:
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


STOPPED_CHILD = """
import multiprocessing, os, signal, subprocess, time
from mpiddp.runtime.job import stop

def work(ready):
    ready.set()
    time.sleep(1000)

stop.AGAIN_S = 0.1
stop.leave_sigterm_to_rank()
context = multiprocessing.get_context("fork")
ready = context.Event()
child = context.Process(target=work, args=(ready,), daemon=True)
child.start()
ready.wait()
signal.signal(signal.SIGTERM, lambda *_: None)
os.kill(child.pid, signal.SIGSTOP)
os.waitpid(child.pid, os.WUNTRACED)
subprocess.run(["kill", "-TERM", str(child.pid)])  # now another one is dropped
subprocess.Popen(["sh", "-c", f"sleep 0.2; kill -CONT {child.pid}"])
print("left")
"""


def test_a_child_ends_although_a_stranger_s_sigterm_has_hidden_that_of_its_rank(
    tmp_path: Path,
) -> None:
    path = tmp_path / "script.py"
    path.write_text(STOPPED_CHILD)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, path], env=env, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "left\n", "")
