"""The time limits of a job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """The time limits of the user, in seconds; None means no limit."""

    grace_s: float = 30.0
    save_grace_s: float = 600.0  # instead of grace_s, while a rank is saving
    start_timeout_s: float | None = None  # until the first rank has started
    stop_after_s: float | None = None
    hang_timeout_s: float | None = None
    grow_s: float | None = None  # between two looks for more hosts; None: no look
