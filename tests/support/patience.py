"""Waits in the tests. Only a test that hangs reaches the time limit, even on a slow machine."""

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_S = 600.0
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
