"""Ranks that hang, and stragglers: when the launcher asks for the stacks of all ranks, and what they show.

A job that is quiet for long may evaluate, save, or make a slow first step. So there are two looks at its
stacks, which cost a rank a few milliseconds. A straggler shows in the times of its steps
(`mpiddp.launch.pace`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from mpiddp.launch.pace import PaceWatch
from mpiddp.launch.ranks import Ranks
from mpiddp.launch.stacks import Place, places_of, places_sentence, stuck_sentences
from mpiddp.text import percentile

QUIET_S, QUIET_STEPS = 60.0, 20  # until the first look: the longer of these; steps are median ones
BETWEEN_LOOKS_S = 10.0
BUSY_FACTOR = 5  # ranks that compute or save may stay in one line for so much longer
MOVING_FACTOR = 10  # ranks for which others wait, in several lines: a loop, an evaluation
_BUSY = 0.2  # of a core
_CHECK_S = 2.0  # more than between two calls of `wants_stacks`
_STEPS = 50  # whose median counts


class Watch:
    """Decides when to ask for the stacks, and what to say. It ends nothing.

    Times are those of the caller's clock, in seconds.

    Args:
        now: when the attempt began.
        timeout_s: of --hang-timeout. The job makes no step in so long only if it hangs. None: a guess from
            the steps, which two looks have to confirm.
    """

    def __init__(self, ranks: Ranks, now: float, timeout_s: float | None = None) -> None:
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._paces = PaceWatch(now)
        self._due_step_at: float | None = None  # the newest step when --hang-timeout was over
        self._signs: tuple[object, ...] = ()
        self._quiet_since = self._look_at = now
        self._step, self._step_at = 0, now  # the newest, and when it was reported
        self._step_s: deque[float] = deque(maxlen=_STEPS)
        self._first: tuple[float, Mapping[int, Place]] | None = None  # the look before

    @property
    def straggler(self) -> str:
        """A sentence about the straggler of the latest steps; "" for none."""
        found = self._paces.current
        return found.sentence(self._ranks.names(found.ranks)) if found else ""

    @property
    def slow_hosts(self) -> dict[str, float]:
        """The hosts of the stragglers that were named, and their part of the others' speed."""
        named = self._paces.named.items()
        return {self._ranks.hosts[rank]: each.others_s / each.time.own_s for rank, each in named}

    def judge_steps(self, now: float) -> list[str]:
        """Sentences about stragglers by the times of their steps. Called about once a second."""
        ranks = self._ranks
        found = self._paces.judge(now, ranks.paces, ranks.newest_step)
        return [found.sentence(ranks.names(found.ranks))] if found else []

    def wants_stacks(self, now: float, silent_s: float) -> bool:
        """Whether to ask for the stacks of all ranks. Called about once a second.

        Args:
            silent_s: for how long no rank has printed anything. It counts until there are steps.
        """
        if self._due_step_at is not None:  # the answers are on their way
            return False
        newest = self._ranks.newest_step_at
        if self._timeout_s is None or newest is None:
            return self._is_quiet_for_long(now, silent_s)
        is_due = now - newest >= self._timeout_s
        self._due_step_at = newest if is_due else None
        return is_due

    def judge_stacks(self, now: float) -> list[str]:
        """Sentences about a hang by the stacks, which are there."""
        if self._timeout_s is None or self._due_step_at is None:
            return self._find_hang(now)
        has_moved = self._ranks.newest_step_at != self._due_step_at
        self._due_step_at = None
        return [] if has_moved else stuck_sentences(self._ranks, self._timeout_s)

    def _is_quiet_for_long(self, now: float, silent_s: float) -> bool:
        ranks = self._ranks
        self._note_steps()
        signs = (self._step, len(ranks.done), len(ranks.saving), ranks.last_saved_at)
        has_printed = silent_s + _CHECK_S < now - self._quiet_since
        if signs != self._signs or (has_printed and not self._step):
            self._signs, self._first = signs, None
            self._quiet_since = now if self._step else now - silent_s
            self._look_at = self._quiet_since + self._patience_s
        return now >= self._look_at

    def _note_steps(self) -> None:
        step, at = max(self._ranks.steps.values(), default=(0, 0.0))
        if step != self._step:
            if 0 < self._step < step:
                self._step_s.append((at - self._step_at) / (step - self._step))
            self._step, self._step_at = step, at

    @property
    def _patience_s(self) -> float:
        if self._timeout_s is not None:
            return self._timeout_s
        return max(QUIET_S, QUIET_STEPS * percentile(self._step_s, 50)) if self._step_s else QUIET_S

    def _find_hang(self, now: float) -> list[str]:
        places, first = places_of(self._ranks), self._first
        if first is None:
            self._first, self._look_at = (now, places), now + BETWEEN_LOOKS_S
            return []
        self._first = None
        if not self._hang(*first, now, places):
            self._look_at = now + self._patience_s
            return []
        self._look_at = float("inf")  # until there is a sign of life
        what = "made a step" if self._step else "made a step or printed anything"
        quiet_s = now - self._quiet_since
        return [f"no rank has {what} for {quiet_s:.0f} s: {places_sentence(self._ranks)}"]

    def _hang(
        self, before: float, first: Mapping[int, Place], now: float, last: Mapping[int, Place]
    ) -> bool:
        """Whether no rank has moved, and one that the others may wait for does nothing."""
        quiet_s, is_saving = now - self._quiet_since, bool(self._ranks.saving)
        outside = {rank: place for rank, place in last.items() if not place.waits}
        if any(first.get(rank, Place()).frames != place.frames for rank, place in last.items()):
            is_long = quiet_s >= MOVING_FACTOR * self._patience_s
            return is_long and 0 < len(outside) < len(last) and not is_saving
        idle_s = _BUSY * (now - before)
        # On a crowded host, a rank that computes has a core for a small part of the time.
        is_idle = [
            place.state != "R" and place.cpu_s - first[rank].cpu_s < idle_s
            for rank, place in outside.items()
        ]
        if len(outside) == len(last) and not (self._step and any(is_idle)):
            return False  # nobody waits for another rank: all compute, or a program makes no steps
        if quiet_s >= BUSY_FACTOR * self._patience_s:
            return True
        return not is_saving and (any(is_idle) or not is_idle)
