"""Signals in a DataLoader's workers: they leave a stop to their rank (`mpiddp.runtime.job.stop`)."""

from __future__ import annotations

import signal

from mpiddp.runtime.job import stop


def obey_only(rank: int, worker: int) -> None:
    """Initialize a worker. `rank` is the pid of its rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop.obey_only(rank)
