"""How fast each rank makes its steps, and which one is a straggler: its own work makes the others wait.

A rank's own time is that in which the thread that makes its steps ran, or could run and waited for a core.
The rest of a step it waits: for other ranks, for data, for a disk or a GPU. Ranks that wait for a GPU or in
NCCL use their core meanwhile, so all their own times are equal, and none is named.

`mpiddp train` tells the phases of its steps. There a rank's own time is that of all phases but "waiting".
A sharded model, or synchronized BatchNorm, waits in every phase, so what these ranks tell does not count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from mpiddp.text import percentile

WINDOW_S = 10.0  # of the steps that count, unless two steps take longer
FACTOR, FACTOR_OF_SEVERAL = 1.3, 2.0  # of the others' own time
_MOST_LATE = 2 / 3  # of all ranks
_LEAST_SHARE = 0.5  # of a step: if the rank is faster, something else takes the time
_MOST_SPREAD = 1.2  # of the times of a step: ranks that differ more do not wait for each other


class StepTime(NamedTuple):
    """The mean seconds of a rank's latest steps. `cpu_s` is that of all its threads."""

    step_s: float
    own_s: float
    cpu_s: float


class Pace:
    """The latest steps of one rank."""

    def __init__(self) -> None:
        self.memory = 0  # of the process, in bytes
        # The time of a step, its number, and the totals of the rank's thread and of its process.
        self._samples: deque[tuple[float, int, float, float]] = deque()
        self._phases = (0.0, 0.0)  # steps and own time by the latest report of phases
        self._own_s: float | None = None  # of a step, by the latest two reports of phases

    def add(self, at: float, facts: Mapping[str, Any]) -> None:
        """The rank has reported a step, a message "progress"."""
        self.memory = facts["memory"]
        samples, step, own_s = self._samples, facts["step"], facts["own_s"]
        if samples and (step <= samples[-1][1] or own_s < samples[-1][2]):
            samples.clear()  # the script has begun anew, or another thread makes the steps now
        samples.append((at, step, own_s, facts["cpu_s"]))
        while len(samples) > 2 and samples[1][0] <= at - WINDOW_S:
            samples.popleft()
        phases = facts.get("phases", {})
        if phases.get("waiting"):
            own_s = sum(phases[name] for name in phases.keys() - {"waiting", "steps"})
            steps_before, own_before = self._phases
            if (steps := phases["steps"] - steps_before) > 0:
                self._own_s = (own_s - own_before) / steps
            self._phases = phases["steps"], own_s

    @property
    def step_time(self) -> StepTime | None:
        """None until there are two reports, and if the clock has stood still between them (Ctrl-Z)."""
        began_at, *began = self._samples[0]
        at, *now = self._samples[-1]
        if at <= began_at:
            return None
        steps, own_s, cpu_s = (last - first for first, last in zip(began, now, strict=True))
        own_s = own_s / steps if self._own_s is None else self._own_s
        return StepTime((at - began_at) / steps, own_s, cpu_s / steps)


class Straggler(NamedTuple):
    """The ranks that make the others wait, the slowest first, its seconds in a step, the others' median."""

    ranks: tuple[int, ...]
    time: StepTime
    others_s: float

    def sentence(self, names: str) -> str:
        """The ranks are `names`."""
        times = self.time.own_s / max(self.others_s, 1e-9)
        factor = f"{times:.1f} times" if times < 100 else "over 100 times"
        are, works = (
            ("is a straggler", "it") if len(self.ranks) == 1 else ("are stragglers", "each")
        )
        return (
            f"{names} {are}: {works} works for {seconds(self.time.own_s)} in a step of "
            f"{seconds(self.time.step_s)}, {factor} as long as the others."
        )


def find_straggler(paces: Mapping[int, Pace]) -> Straggler | None:
    """The ranks that make the others wait in the latest steps, if there are some."""
    times = {rank: time for rank, pace in paces.items() if (time := pace.step_time) is not None}
    step_s = [each.step_s for each in times.values()]
    if len(times) < 2 or max(step_s) > _MOST_SPREAD * min(step_s):
        return None
    by_time = sorted(times, key=lambda rank: times[rank].own_s, reverse=True)
    time = times[by_time[0]]
    if time.own_s < _LEAST_SHARE * time.step_s:
        return None
    late = [rank for rank in by_time if times[rank].own_s * FACTOR > time.own_s]
    for number, factor in ((len(late), FACTOR_OF_SEVERAL), (1, FACTOR)):
        if number <= _MOST_LATE * len(times):
            others_s = percentile([times[rank].own_s for rank in by_time[number:]], 50)
            if time.own_s >= factor * others_s:
                return Straggler(tuple(by_time[:number]), time, others_s)
    return None


def seconds(value: float) -> str:
    """ "1.2 s" or "38 ms"."""
    return f"{value:.1f} s" if value >= 1 else f"{value * 1000:.3g} ms"
