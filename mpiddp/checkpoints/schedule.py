"""When a save is due: after so many steps, or by the clock of rank 0."""

from __future__ import annotations

import time

from mpiddp.runtime.job.coordinator import Coordinator

_CLOCK_CHECKS_PER_PAUSE = 4
_FIRST_PAUSE = 1 / 8  # of the interval


class SaveSchedule:
    """Decides after each step whether a save is due, equally on all ranks, which must all call `is_due`.

    An int counts steps. For a float, which is seconds, rank 0 reads its clock at a few steps that all ranks
    know, and tells them whether a save is due, and at which step it reads the clock next. It also saves after
    the first step of a new run, so that a state that cannot be saved is refused at once.

    Each start also saves after 1/8, 1/4 and 1/2 of the interval, because a failure in the first interval
    would lose everything since the start.
    """

    def __init__(
        self,
        interval: int | float | None,
        coordinator: Coordinator,
        step: int,
        *,
        is_new: bool,
        timeout_s: float,
    ) -> None:
        self._interval, self._coordinator, self._timeout_s = interval, coordinator, timeout_s
        self._start = self._previous = step
        self._next_check = step + 1
        self._started_at = self._saved_at = time.monotonic()
        self._pause_s = _FIRST_PAUSE * (interval or 0)  # from the last save to the next one
        self._checked = (step, self._saved_at)
        self._is_new = is_new

    def is_due(self, step: int) -> bool:
        interval = self._interval
        if isinstance(interval, int):
            # Step 0 is no multiple: a script may count its steps from 0 or from 1, or samples as steps.
            previous, self._previous = max(self._previous, 0), step
            return interval == 1 or step // interval > previous // interval
        if interval is None or step < self._next_check:
            return False
        now = time.monotonic()
        checked_step, checked_at = self._checked
        step_s = max(now - checked_at, 1e-9) / max(step - checked_step, 1)
        self._checked = (step, now)
        left_s = self._pause_s - (now - self._saved_at)
        is_due = self._is_new or left_s < step_s / 2
        self._is_new = False
        if is_due:
            # It doubles, so that the saves are as far apart as the start is ago.
            self._pause_s = max(_FIRST_PAUSE * interval, min(now - self._started_at, interval))
            self._saved_at, left_s = now, self._pause_s
        pause = int(min(left_s, self._pause_s / _CLOCK_CHECKS_PER_PAUSE) / step_s)
        # The times of the first steps are too short: the GPU has only queued them.
        pause = max(1, min(pause, 2 * (step - self._start)))
        by_rank = self._coordinator.all_gather_json((is_due, pause), timeout_s=self._timeout_s)
        is_due, pause = by_rank[0]
        self._next_check = step + pause
        return is_due
