"""Ranks that hang: when the launcher looks at their stacks, whether they hang, and who holds the others up.

A job that is quiet for long may evaluate, save, or make a slow first step. So there are two looks. In between
the ranks may move on. Each look costs a rank a few milliseconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from mpiddp.launch.monitor.places import Place, place_of, places_of, places_sentence
from mpiddp.launch.monitor.ranks import Ranks
from mpiddp.text import percentile

QUIET_S, QUIET_STEPS = 60.0, 20  # until the first look: the longer of these; steps are median ones
BETWEEN_LOOKS_S = 10.0
BUSY_FACTOR = 5  # ranks that compute or save may stay in one line for so much longer
MOVING_FACTOR = 10  # ranks for which others wait, in several lines: a loop, an evaluation
_BUSY = 0.2  # of a core
_CHECK_S = 2.0  # more than between two calls of `is_due`
_STEPS = 50  # whose median counts


class _Look(NamedTuple):
    at: float
    places: Mapping[int, Place]  # of the ranks that have not ended


class HangWatch:
    """Decides when to look at the stacks, and what to say of them. It ends nothing.

    Times are those of the caller's clock, in seconds.

    Args:
        timeout_s: the user's limit. The job makes no step in so long only if it hangs. None: a guess from the
            steps, which two looks have to confirm.
    """

    def __init__(self, ranks: Ranks, now: float, timeout_s: float | None = None) -> None:
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._due_at: float | None = None  # the newest step when the limit was over
        self._signs: tuple[object, ...] = ()
        self._quiet_since = self._look_at = now
        self._step, self._step_at = 0, now  # the newest, and when it was reported
        self._step_s: deque[float] = deque(maxlen=_STEPS)
        self._first: _Look | None = None  # the look before

    def is_due(self, now: float, silent_s: float) -> bool:
        """Whether to request the stacks of all ranks. Call this about once a second.

        Args:
            silent_s: for how long no rank has printed anything. It counts until there are steps.
        """
        ranks, newest = self._ranks, self._ranks.newest_step_at
        if self._timeout_s is not None and newest is not None:
            if is_due := now - newest >= self._timeout_s:
                self._due_at = newest  # until the stacks are there, `look` compares with this step
            return is_due
        self._note_steps()
        signs: tuple[object, ...] = (
            self._step,
            len(ranks.done),
            len(ranks.saving),
            ranks.last_saved_at,
        )
        has_printed = silent_s + _CHECK_S < now - self._quiet_since
        if signs != self._signs or (has_printed and not self._step):
            self._signs, self._first = signs, None
            self._quiet_since = now if self._step else now - silent_s
            self._look_at = self._quiet_since + self._patience_s
        return now >= self._look_at

    def look(self, now: float) -> list[str]:
        """Judge the stacks, which are there, by the user's limit, or by those of the look before.

        Returns:
            Sentences that say who waits where, if the ranks hang; else none.
        """
        ranks = self._ranks
        if self._timeout_s is not None and self._due_at is not None:
            has_moved = ranks.newest_step_at != self._due_at
            return [] if has_moved else stuck_sentences(ranks, self._timeout_s)
        places = places_of(ranks)
        first, last = self._first, _Look(now, places)
        if first is None:
            self._first, self._look_at = last, now + BETWEEN_LOOKS_S
            return []
        self._first = None
        if not self._hang(first, last):
            self._look_at = now + self._patience_s
            return []
        self._look_at = float("inf")  # until there is a sign of life
        step = (
            "no rank has made a step"
            if self._step
            else "no rank has made a step or printed anything"
        )
        return [f"{step} for {now - self._quiet_since:.0f} s: {places_sentence(ranks, places)}"]

    @property
    def _patience_s(self) -> float:
        if self._timeout_s is not None:
            return self._timeout_s
        return max(QUIET_S, QUIET_STEPS * percentile(self._step_s, 50)) if self._step_s else QUIET_S

    def _note_steps(self) -> None:
        step, at = max(self._ranks.steps.values(), default=(0, 0.0))
        if step != self._step:
            if 0 < self._step < step:
                self._step_s.append((at - self._step_at) / (step - self._step))
            self._step, self._step_at = step, at

    def _hang(self, first: _Look, last: _Look) -> bool:
        """Whether no rank has moved, and one that the others may wait for does nothing."""
        outside = {rank: at for rank, at in last.places.items() if not at.waits}
        has_moved = [
            first.places.get(rank, Place()).frames != at.frames for rank, at in last.places.items()
        ]
        if any(has_moved):
            is_long = last.at - self._quiet_since >= MOVING_FACTOR * self._patience_s
            return is_long and 0 < len(outside) < len(last.places) and not self._ranks.saving
        idle_s = _BUSY * (last.at - first.at)
        is_idle = [at.cpu_s - first.places[rank].cpu_s < idle_s for rank, at in outside.items()]
        if len(outside) == len(last.places) and not (self._step and any(is_idle)):
            return False  # nobody waits for another rank: all compute, or a program makes no steps
        if last.at - self._quiet_since >= BUSY_FACTOR * self._patience_s:
            return True
        return not self._ranks.saving and (any(is_idle) or not is_idle)


def stacks_sentence(ranks: Ranks) -> str:
    """Where the ranks that have not ended are, by the stacks that they have sent."""
    return places_sentence(ranks, places_of(ranks))


def stuck_sentences(ranks: Ranks, timeout_s: float) -> list[str]:
    """A sentence for each stuck rank, followed by its stack.

    The stuck ranks are those that do not answer; else those that are behind; else those that are outside
    of torch, where the others wait.
    """
    left = [rank for rank in range(ranks.world_size) if rank not in ranks.done]
    steps = {rank: ranks.stacks[rank]["step"] for rank in left if rank in ranks.stacks}
    furthest = max(steps.values(), default=0)
    mute = [rank for rank in left if rank not in steps]
    behind = [rank for rank, step in steps.items() if step < furthest]
    outside = [rank for rank in steps if not place_of(ranks.stacks[rank]).waits]
    # None waits if the rank is the only one that is left, nor do ranks of which none has answered.
    others = f"the others wait at step {furthest}" if steps and len(left) > 1 else ""
    found = []
    held = sorted(ranks.held & steps.keys())
    for rank in mute or held or behind or outside or left:
        what = f"{ranks.name(rank)} has made no step for {timeout_s:g} s"
        waiting = f" The{others[3:]}." if others else ""
        if rank in mute:
            found.append(
                f"{what} and does not answer: it is stopped, or stuck in native code.{waiting}"
            )
        elif rank in held:
            text = ranks.stacks[rank]["text"].rstrip()
            found.append(
                f"{what}: native code holds its Python interpreter.{waiting} Its Python stack "
                f"follows.\n{text}"
            )
        else:
            text = ranks.stacks[rank]["text"].rstrip()
            beside = f" while {others}" if others else ""
            found.append(f"{what}{beside}. Its Python stack follows.\n{text}")
    return found
