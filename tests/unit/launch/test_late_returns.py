"""The launcher's clock: only the time in which the launcher itself was stopped does not count.

Tests mpiddp/launch/supervise/signals.py.
python -m pytest tests/unit/launch/test_late_returns.py
"""

from __future__ import annotations

import os
import selectors

from mpiddp.launch.supervise.signals import AwakeSelector


def test_a_wait_that_ends_early_counts() -> None:
    """An event comes long before the limit of the wait: the clock neither jumps nor goes back."""
    reader, writer = os.pipe()
    with AwakeSelector() as clock:
        clock.register(reader, selectors.EVENT_READ)
        os.write(writer, b"x")
        before = clock.now()
        assert clock.select(1000.0)
        assert 0 <= clock.now() - before < 500
    os.close(reader)
    os.close(writer)
