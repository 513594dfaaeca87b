"""Signals in a DataLoader's workers: they leave a stop to their rank (`mpiddp.runtime.job.child_signals`)."""

from __future__ import annotations

import signal

from mpiddp.runtime.job import child_signals


def obey_only(rank: int, worker: int) -> None:
    """Initialize a worker. `rank` is the pid of its rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child_signals.obey_only(rank)
