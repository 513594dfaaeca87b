"""The pace of one rank: its present step, and the times of its latest steps.

A rank's own time is the time in which the thread that makes its steps ran, or was ready and waited for a
core. In the rest of a step, it waits for other ranks, for data or for a disk. A rank that waits for a GPU or
in NCCL uses its core meanwhile, so this is its own time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

WINDOW_S = 10.0  # the latest steps in this time count, or at least two steps


class Pace:
    """The latest steps of one rank."""

    def __init__(self) -> None:
        self.step, self.since = -1, 0.0  # the present step, and when it began
        self.memory = 0  # of the process, in bytes
        self._counter = -1  # who counts its steps
        # The time of a step, its number, and the totals of the rank's thread and of its process.
        self._samples: deque[tuple[float, int, float, float]] = deque()

    def add(self, at: float, facts: Mapping[str, Any]) -> None:
        """The rank has reported a step, a message "progress"."""
        self.memory = facts["memory"]
        samples, step, own_s = self._samples, facts["step"], facts["own_s"]
        if step != self.step:  # the script may begin anew
            self.step, self.since = step, at
        before, self._counter = self._counter, facts["counter"]
        if samples and (
            self._counter != before or step <= samples[-1][1] or own_s < samples[-1][2]
        ):
            samples.clear()  # the script has begun anew, or another counter or thread makes the steps now
        samples.append((at, step, own_s, facts["cpu_s"]))
        while len(samples) > 2 and samples[1][0] <= at - WINDOW_S:
            samples.popleft()

    @property
    def step_time(self) -> tuple[float, float, float] | None:
        """The mean seconds of the latest steps: in all, the rank's own, and those of all its threads.

        None until there are two reports, and if the clock has stood still between them (Ctrl-Z).
        """
        began_at, *began = self._samples[0]
        at, *now = self._samples[-1]
        if at <= began_at:
            return None
        steps, own_s, cpu_s = (last - first for first, last in zip(began, now, strict=True))
        return (at - began_at) / steps, own_s / steps, cpu_s / steps
