"""How fast each rank makes its steps, and which of them hold the others up.

A rank's own time is that in which the thread that makes its steps ran, or could run and waited for a core.
The rest of a step it waits: for other ranks, for data, for a disk or a GPU. Ranks that wait for a GPU or in
NCCL use their core meanwhile, so all their own times are equal, and none is named.

`mpiddp train` tells the phases of its steps. There a rank's own time is that of all phases but "waiting".
A sharded model, or synchronized BatchNorm, waits in every phase, so what these ranks tell does not count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mpiddp.text import percentile

WINDOW_S = 10.0  # of the steps that count, unless two steps take longer
CHRONIC = 3  # windows in a row that name the same rank
FACTOR, FACTOR_OF_SEVERAL = 1.3, 2.0  # of the others' own time
_MOST_LATE = 2 / 3  # of all ranks
_LEAST_SHARE = 0.5  # of a step: if the rank is faster, something else takes the time
_MOST_SPREAD = 1.2  # of the times of a step: ranks that differ more do not wait for each other
_QUEUED_SHARE = 0.3  # of the rank's own time, so that its host is the likely cause
_WAITING = "waiting"  # the phase in which a rank waits for others


class _Sample(NamedTuple):
    """The totals of a rank's thread and of its process, at the time of a step."""

    at: float
    step: int
    own_s: float
    queued_s: float
    cpu_s: float


class StepTime(NamedTuple):
    """The mean seconds of a rank's latest steps.

    `own_s` includes `queued_s`, in which its thread has no core. `cpu_s` is that of all its threads.
    """

    step_s: float
    own_s: float
    queued_s: float
    cpu_s: float


class Pace:
    """The latest steps of one rank.

    Attributes:
        memory: of the process, in bytes.
        phases: the mean seconds of a step in each phase, between the latest two reports of them.
    """

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque()
        self._told: Mapping[str, float] = {}
        self.memory = 0
        self.phases: Mapping[str, float] = {}

    def add(self, at: float, facts: Mapping[str, Any]) -> None:
        """The rank has reported a step, a message "progress"."""
        self.memory = facts["memory"]
        new = _Sample(at, facts["step"], facts["own_s"], facts["queued_s"], facts["cpu_s"])
        samples = self._samples
        if samples and (new.step <= samples[-1].step or new.own_s < samples[-1].own_s):
            samples.clear()  # the script has begun anew, or another thread makes the steps now
        samples.append(new)
        while len(samples) > 2 and samples[1].at <= at - WINDOW_S:
            samples.popleft()
        told = facts.get("phases", {})
        if told.get(_WAITING):
            before, self._told = self._told, told
            if (steps := told["steps"] - before.get("steps", 0)) > 0:
                new_s = {name: told[name] - before.get(name, 0.0) for name in told}
                self.phases = {name: new_s[name] / steps for name in told if name != "steps"}

    @property
    def step_time(self) -> StepTime | None:
        """None until there are two reports, and if the clock has stood still between them (Ctrl-Z)."""
        first, last = self._samples[0], self._samples[-1]
        if last.at <= first.at:
            return None
        steps = last.step - first.step
        exact = [value for name, value in self.phases.items() if name != _WAITING]
        return StepTime(
            (last.at - first.at) / steps,
            sum(exact) if exact else (last.own_s - first.own_s) / steps,
            (last.queued_s - first.queued_s) / steps,
            (last.cpu_s - first.cpu_s) / steps,
        )


class Holder(NamedTuple):
    """The ranks that hold the others up, the slowest first, its seconds in a step, and the others' median.

    phase: that in which it is latest, if the ranks tell theirs; its seconds, and the others' median.
    """

    ranks: tuple[int, ...]
    time: StepTime
    others_s: float
    phase: tuple[str, float, float] | None = None

    def sentence(self, names: str) -> str:
        """The ranks are `names`."""
        times = self.time.own_s / max(self.others_s, 1e-9)
        factor = f"{times:.1f} times" if times < 100 else "over 100 times"
        cause = ""
        is_one = len(self.ranks) == 1
        who, holds = ("it works", "holds") if is_one else ("each works", "hold")
        if self.time.queued_s > _QUEUED_SHARE * self.time.own_s:
            share = self.time.queued_s / self.time.own_s
            cause = f" In {share:.0%} of it, other processes have its core."
        elif self.phase is not None:
            name, own_s, others_s = self.phase
            cause = f" Its {name} takes {seconds(own_s)}, theirs {seconds(others_s)}."
        return (
            f"{names} {holds} the others up: {who} for {seconds(self.time.own_s)} in a step of "
            f"{seconds(self.time.step_s)}, {factor} as long as they do.{cause}"
        )


def find_holder(paces: Mapping[int, Pace]) -> Holder | None:
    """The ranks that make the others wait in the latest steps, if there are some."""
    times = _step_times(paces)
    if len(times) < 2 or not _are_together(times.values()):
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
                phase = _latest_phase(paces, by_time[0], by_time[number:])
                return Holder(tuple(by_time[:number]), time, others_s, phase)
    return None


def _latest_phase(
    paces: Mapping[int, Pace], slow: int, others: Sequence[int]
) -> tuple[str, float, float] | None:
    """The phase in which the slow rank is behind the others most, its seconds, and their median."""
    found = [
        (name, own_s, percentile([paces[rank].phases.get(name, 0.0) for rank in others], 50))
        for name, own_s in paces[slow].phases.items()
        if name != _WAITING
    ]
    return max(found, key=lambda each: each[1] - each[2], default=None)


def all_wait(paces: Mapping[int, Pace]) -> bool:
    """Whether ranks that make their steps together all wait for most of a step."""
    times = _step_times(paces)
    return (
        len(times) > 1
        and _are_together(times.values())
        and all(each.own_s < _LEAST_SHARE * each.step_s for each in times.values())
    )


def _step_times(paces: Mapping[int, Pace]) -> dict[int, StepTime]:
    return {rank: time for rank, pace in paces.items() if (time := pace.step_time) is not None}


def _are_together(times: Iterable[StepTime]) -> bool:
    step_s = [each.step_s for each in times]
    return max(step_s) <= _MOST_SPREAD * min(step_s)


class SkewWatch:
    """Names ranks that hold the others up for long, each once. Times are of the caller's clock, in seconds.

    Args:
        now: when the attempt began.
    """

    def __init__(self, now: float) -> None:
        self._look_at = now + WINDOW_S
        self._newest = 0  # the step at the last look
        self._in_a_row = 0
        self._late: set[int] = set()  # in all windows of the row
        self.named: dict[int, Holder] = {}  # by their ranks
        self.holder: Holder | None = None  # at the last look

    def look(self, now: float, paces: Mapping[int, Pace], newest: int) -> Holder | None:
        """The ranks to name now, if there are some. Call this about once a second.

        Args:
            newest: the newest step of any rank.
        """
        if now < self._look_at:
            return None
        if newest == self._newest:  # no rank makes steps: nobody is slower than the others
            self._look_at, self.holder = now + WINDOW_S, None
            return None
        self._look_at, self._newest = now + WINDOW_S, newest
        self.holder = find_holder(paces)
        late = set(self.holder.ranks) if self.holder else set()
        is_same = bool(late & self._late)
        self._in_a_row, self._late = (
            (self._in_a_row + 1, late & self._late) if is_same else (1, late)
        )
        if self.holder is None or self._in_a_row < CHRONIC or self._late <= self.named.keys():
            return None
        ranks = tuple(rank for rank in self.holder.ranks if rank in self._late)
        found = self.holder._replace(ranks=ranks)
        self.named |= dict.fromkeys(ranks, found)
        return found


def seconds(value: float) -> str:
    """ "1.2 s" or "38 ms"."""
    return f"{value:.1f} s" if value >= 1 else f"{value * 1000:.3g} ms"
