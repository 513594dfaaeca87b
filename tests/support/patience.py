"""Waits in the tests, and the limits of promised times.

Only a test that hangs reaches PATIENCE_S, even on a slow machine. A promised number of seconds is for an idle
machine with two cores; `within` allows more where programs take longer.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

PATIENCE_S = 600.0
PROGRAM = (sys.executable, "-c", "import argparse, json, socket")
STARTS, IDLE_S = 5, 0.15  # the program's starts, and their seconds on the idle machine
T = TypeVar("T")


def eventually(condition: Callable[[], T], *, poll_s: float = 0.05) -> T:
    """Wait until the condition is true, and return its value.

    Raises:
        TimeoutError: it is not true after PATIENCE_S.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"still waiting after {PATIENCE_S:.0f} s")
        time.sleep(poll_s)
    return value


def slowness() -> float:
    """How many times as long as on the idle machine a program takes here and now, at least 1."""
    since = time.monotonic()
    for _ in range(STARTS):
        subprocess.run(PROGRAM, check=True)
    return max(1.0, (time.monotonic() - since) / IDLE_S)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """A block that takes at most so many seconds on the idle machine.

    The slowness is measured before the block and after it, because other tests begin and end meanwhile.
    """
    factor = slowness()
    since = time.monotonic()
    yield
    taken = time.monotonic() - since
    if taken > seconds * factor:
        factor = max(factor, slowness())
    assert taken <= seconds * factor, f"{taken:.1f} s, but {seconds} s × {factor:.1f} are promised"
