"""Decide when to save, by steps or by the clock, equally on all ranks and without a message in every step."""

from __future__ import annotations

import time
from dataclasses import dataclass

from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.text import parse_duration, parse_whole, shown

_CHECKS_PER_INTERVAL = 4  # of the clock


@dataclass(frozen=True)
class Interval:
    """The interval between two checkpoints, in steps or in seconds. The other field is None."""

    steps: int | None = None
    seconds: float | None = None


def parse_interval(text: str) -> Interval:
    """`20` is a number of steps; `30s`, `10m` and `1.5h` are times. Raises ValueError otherwise."""
    if text.endswith(("s", "m", "h")):
        return Interval(seconds=parse_duration(text))
    try:
        return Interval(steps=parse_whole(text, 1))
    except ValueError as error:
        raise ValueError(f"{shown(text)!r} is not {error}, and not a duration") from None


class SaveSchedule:
    """Decides after each step whether a save is due. Every rank must call `is_due` after every step.

    For an interval in seconds, rank 0 reads its clock at a few steps that all ranks know. It broadcasts
    whether a save is due, and the step of the next check. The steps between exchange no message.
    """

    def __init__(
        self, interval: Interval | None, coordinator: Coordinator, step: int, *, timeout_s: float
    ) -> None:
        self._coordinator = coordinator
        self._timeout_s = timeout_s
        self._steps = interval.steps if interval else None
        seconds = interval.seconds if interval else None
        self._clock = _Clock(seconds, step) if seconds is not None else None
        self._next_check = step + 1
        self._previous = step

    def is_due(self, step: int, *, ends_epoch: bool) -> bool:
        if self._clock is not None:
            return self._is_due_by(self._clock, step)
        if self._steps is None:
            return ends_epoch
        previous, self._previous = self._previous, step
        return step // self._steps > previous // self._steps  # a script may count samples as steps

    def _is_due_by(self, clock: _Clock, step: int) -> bool:
        if step < self._next_check:
            return False
        own = clock.check(step) if self._coordinator.world.rank == 0 else (False, 0)
        is_due, pause = self._coordinator.all_gather_json(own, timeout_s=self._timeout_s)[0]
        self._next_check = step + pause
        return is_due


class _Clock:
    """Rank 0's clock: measures the steps, and decides when to save."""

    def __init__(self, interval_s: float, step: int) -> None:
        self._interval_s = interval_s
        self._start = step
        self._saved_at = time.monotonic()
        self._checked = (step, self._saved_at)

    def check(self, step: int) -> tuple[bool, int]:
        """Whether a save is due, and the number of steps until the next check."""
        now = time.monotonic()
        checked_step, checked_at = self._checked
        step_s = max(now - checked_at, 1e-9) / max(step - checked_step, 1)
        self._checked = (step, now)
        left_s = self._interval_s - (now - self._saved_at)
        is_due = left_s < step_s / 2
        if is_due:
            self._saved_at, left_s = now, self._interval_s
        pause = int(min(left_s, self._interval_s / _CHECKS_PER_INTERVAL) / step_s)
        # The times of the first steps are too short: the GPU has only queued them.
        pause = min(pause, 2 * (step - self._start))
        return is_due, max(1, pause)
