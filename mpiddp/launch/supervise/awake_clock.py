"""A clock that stands still while this process is stopped, as by Ctrl-Z.

The ranks run on meanwhile, and their messages wait in the sockets. So after `fg`, no time limit must have
passed merely because this process has read nothing.
"""

from __future__ import annotations

import selectors
import time

_STOPPED_S = 2.0  # a wait that takes so much longer than requested was a stop


class AwakeClock:
    """Seconds, from an arbitrary start."""

    def __init__(self) -> None:
        self._stopped_s = 0.0
        self._returned_at = time.monotonic()

    def now(self) -> float:
        return time.monotonic() - self._stopped_s

    def select(
        self, selector: selectors.BaseSelector, timeout_s: float | None
    ) -> list[tuple[selectors.SelectorKey, int]]:
        """`selector.select(timeout_s)`. The time by which it returns late does not count."""
        ready = selector.select(timeout_s)
        now = time.monotonic()
        if timeout_s is not None:
            late_s = now - self._returned_at - timeout_s
            self._stopped_s += late_s if late_s > _STOPPED_S else 0.0
        self._returned_at = now
        return ready
