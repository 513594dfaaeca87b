"""When to save, by steps or by the clock: the same answer on every rank, without a message per step."""

from __future__ import annotations

import time
from dataclasses import dataclass

from mpiddp.runtime.coordinator import Coordinator
from mpiddp.text import parse_duration

LOOKS = 4  # at the clock, in every interval


@dataclass(frozen=True)
class Interval:
    """An interval between checkpoints: one of the two is None."""

    steps: int | None = None
    seconds: float | None = None


def parse_interval(text: str) -> Interval:
    """`20` is steps, `30s`, `10m` and `1.5h` are times. Raises ValueError for anything else."""
    if text.isascii() and text.isdigit() and int(text) > 0:
        return Interval(steps=int(text))
    if not text.endswith(("s", "m", "h")):
        raise ValueError(text)
    return Interval(seconds=parse_duration(text))


class SaveSchedule:
    """Says after each step whether a checkpoint is due. Every rank must ask, at every step.

    A time is turned into steps: at a few agreed steps rank 0 reads its clock, and says whether a save
    is due and at which step to ask again. The steps between cost nothing.
    """

    def __init__(
        self, every: Interval | None, coordinator: Coordinator, step: int, *, timeout_s: float
    ) -> None:
        self._coordinator = coordinator
        self._timeout_s = timeout_s
        self._steps = every.steps if every else None
        self._clock = _Clock(every.seconds, step) if every and every.seconds is not None else None
        self._next_look = step + 1

    def at(self, step: int, *, ends_epoch: bool) -> bool:
        if self._clock is not None:
            return self._is_time(self._clock, step)
        return ends_epoch if self._steps is None else step % self._steps == 0

    def _is_time(self, clock: _Clock, step: int) -> bool:
        if step < self._next_look:
            return False
        own = clock.look(step) if self._coordinator.world.rank == 0 else (False, 0)
        is_due, pause = self._coordinator.all_gather_json(own, timeout_s=self._timeout_s)[0]
        self._next_look = step + pause
        return is_due


class _Clock:
    """Rank 0's: whether it is time to save, as the steps pass."""

    def __init__(self, interval_s: float, step: int) -> None:
        self._interval_s = interval_s
        self._start = step
        self._saved_at = time.monotonic()
        self._looked = (step, self._saved_at)

    def look(self, step: int) -> tuple[bool, int]:
        """Whether it is time, and the number of steps until the next look."""
        now = time.monotonic()
        looked_step, looked_at = self._looked
        step_s = max(now - looked_at, 1e-9) / max(step - looked_step, 1)
        self._looked = (step, now)
        left_s = self._interval_s - (now - self._saved_at)
        is_due = left_s < step_s / 2
        if is_due:
            self._saved_at, left_s = now, self._interval_s
        pause = int(min(left_s, self._interval_s / LOOKS) / step_s)
        # The first steps tell little: a GPU has only been given them, not done them.
        pause = min(pause, 2 * (step - self._start))
        return is_due, max(1, pause)
