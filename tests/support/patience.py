"""Waits in the tests, and the limits of promised times.

Only a test that fails reaches its limit: EVENT_S for a wait for an event, such as the end of a command. A
promised number of seconds is for an idle machine with two cores. On a slower one, events and promises have
more time, in proportion, but at most MOST times as much, which is PATIENCE_S where nobody measures.
"""

import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, TypeVar

import pytest

EVENT_S, MOST = 120.0, 3.0
PATIENCE_S = MOST * EVENT_S
PROGRAM = (sys.executable, "-c", "import argparse, json, socket")
STARTS, IDLE_S = 5, 0.15  # the program's starts, and their seconds on the idle machine
T = TypeVar("T")


def eventually(condition: Callable[[], T], *, poll_s: float = 0.05) -> T:
    """Wait until the condition is true, and return its value.

    Raises:
        TimeoutError: it is not true after EVENT_S, or after as much more as this machine is slower.
    """
    began, limit_s, is_measured = time.monotonic(), EVENT_S, False
    while not (value := condition()):
        if time.monotonic() > began + limit_s:
            if is_measured:
                raise TimeoutError(f"still waiting after {limit_s:.0f} s")
            limit_s, is_measured = EVENT_S * min(slowness(), MOST), True
        time.sleep(poll_s)
    return value


def until_readable(file: int | IO[str]) -> None:
    """Wait until a file has something to read. A pidfd has, once its process has ended."""
    eventually(lambda: select.select([file], [], [], 1.0)[0], poll_s=0)


def slowness() -> float:
    """How many times as long as on the idle machine a program takes here and now, at least 1."""
    since = time.monotonic()
    for _ in range(STARTS):
        subprocess.run(PROGRAM, check=True)
    return max(1.0, (time.monotonic() - since) / IDLE_S)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """A block that takes at most so many seconds on the idle machine.

    The slowness is measured before the block and after it, because other tests begin and end meanwhile. On
    a machine that is more than MOST times as slow, a time says nothing, so a test that takes longer skips.
    """
    factor = slowness()
    since = time.monotonic()
    yield
    taken = time.monotonic() - since
    if taken > seconds * factor:
        factor = max(factor, slowness())
    limit_s = seconds * min(factor, MOST)
    if taken > limit_s and factor > MOST:
        pytest.skip(
            f"{taken:.1f} s, not {seconds} s, on a machine that is {factor:.1f} times as slow"
        )
    assert taken <= limit_s, f"{taken:.1f} s, but {seconds} s × {factor:.1f} are promised"
