"""When to save, by steps or by the clock: the same answer on every rank, without a word per step."""

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

    A time is turned into steps: at a few agreed steps rank 0 looks at its clock, and says whether it
    is time or how many steps on to ask again. The steps between cost nothing.
    """

    def __init__(
        self, every: Interval | None, coordinator: Coordinator, step: int, *, timeout_s: float
    ) -> None:
        self._every = every
        self._coordinator = coordinator
        self._timeout_s = timeout_s
        self._start = step
        self._saved_at = time.monotonic()
        self._looked = (step, self._saved_at)
        self._next_look = step + 1

    def at(self, step: int, *, ends_epoch: bool) -> bool:
        if self._every is None:
            return ends_epoch
        if self._every.steps is not None:
            return step % self._every.steps == 0
        if step < self._next_look:
            return False
        own = self._look(step) if self._coordinator.world.rank == 0 else ""
        is_due, pause = map(
            int, self._coordinator.all_gather_json(own, timeout_s=self._timeout_s)[0].split()
        )
        self._next_look = step + pause
        return bool(is_due)

    def _look(self, step: int) -> str:
        """Rank 0: whether it is time, and the steps until the next look."""
        assert self._every is not None
        assert self._every.seconds is not None
        now = time.monotonic()
        looked_step, looked_at = self._looked
        step_s = max(now - looked_at, 1e-9) / max(step - looked_step, 1)
        self._looked = (step, now)
        left_s = self._every.seconds - (now - self._saved_at)
        is_due = left_s < step_s / 2
        if is_due:
            self._saved_at, left_s = now, self._every.seconds
        pause = int(min(left_s, self._every.seconds / LOOKS) / step_s)
        # The first steps tell little: a GPU has only been given them, not done them.
        pause = min(pause, 2 * (step - self._start))
        return f"{int(is_due)} {max(1, pause)}"
