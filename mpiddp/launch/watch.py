"""Ranks that hang, and stragglers: when the launcher asks for the stacks of all ranks, and what they show.

- A job that is quiet for long may evaluate, save, or make a slow first step. So there are two looks.
- A straggler that works shows in the times of its steps (`mpiddp.launch.pace`). One that loads data, waits
  for a disk, or sleeps uses no core, and only its stacks show it. While all ranks mostly wait, there is a
  look about once a second, at random moments: others would fall on the same part of every step.

An answer costs a rank a few milliseconds.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping

from mpiddp.launch.pace import WINDOW_S, PaceWatch, all_wait
from mpiddp.launch.ranks import Ranks
from mpiddp.launch.stacks import Place, places_of, places_sentence, stuck_sentences
from mpiddp.text import percentile

# Hangs.
QUIET_S, QUIET_STEPS = 60.0, 20  # until the first look: the longer of these; steps are median ones
BETWEEN_LOOKS_S = 10.0
BUSY_FACTOR = 5  # ranks that compute or save may stay in one line for so much longer
MOVING_FACTOR = 10  # ranks for which others wait, in several lines: a loop, an evaluation
_BUSY = 0.2  # of a core
_CHECK_S = 2.0  # more than between two calls of `wants_stacks`
_STEPS = 50  # whose median counts

# Stragglers without a core.
LOOKS, WINDOWS = 10, 3  # looks of a window, and windows in a row that show the same rank at work
REST_S, REST_OF_NAMED_S = 60.0, 300.0
_LEAST, _MOST_OF_ANOTHER = 4, 1  # looks of a window: that rank, and any other one
_SHARE_AT_WORK = 4  # at most every fourth rank is, if the others wait for these
_LIKELY = 0.5  # of the looks that show a rank, for its cause


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
        self._is_quiet = False  # the stacks are for the question whether the ranks hang
        self._signs: tuple[object, ...] = ()
        self._quiet_since = self._look_at = now
        self._step, self._step_at = 0, now  # the newest, and when it was reported
        self._step_s: deque[float] = deque(maxlen=_STEPS)
        self._first: tuple[float, Mapping[int, Place]] | None = None  # the look before
        self._seen: list[list[tuple[int, Place]]] = []  # who was at work, alone, in each look
        self._rests_until = 0.0
        self._idle_straggler = ""
        self._named: set[int] = set()

    @property
    def straggler(self) -> str:
        """A sentence about the straggler of the latest steps; "" for none."""
        found = self._paces.current
        return found.sentence(self._ranks.names(found.ranks)) if found else self._idle_straggler

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
        """Whether to ask for the stacks of all ranks. Called about once a second, at random moments.

        Args:
            silent_s: for how long no rank has printed anything. It counts until there are steps.
        """
        if self._due_step_at is not None:  # the answers are on their way
            return False
        newest = self._ranks.newest_step_at
        if self._timeout_s is not None and newest is not None:
            self._is_quiet = now - newest >= self._timeout_s
            self._due_step_at = newest if self._is_quiet else None
        else:
            self._is_quiet = self._is_quiet_for_long(now, silent_s)
        if self._is_quiet:
            return True
        if newest is None or now - newest > WINDOW_S or not all_wait(self._ranks.paces):
            self._idle_straggler = ""
            return False
        return now >= self._rests_until

    def judge_stacks(self, now: float) -> tuple[list[str], bool]:
        """Sentences about the stacks, which are there, and whether they are about a hang."""
        if not self._is_quiet:
            return self._find_straggler(now), False
        if self._timeout_s is not None and self._due_step_at is not None:
            has_moved = self._ranks.newest_step_at != self._due_step_at
            self._due_step_at = None
            return [] if has_moved else stuck_sentences(self._ranks, self._timeout_s), True
        return self._find_hang(now), True

    # --- hangs ---

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
        is_idle = [place.cpu_s - first[rank].cpu_s < idle_s for rank, place in outside.items()]
        if len(outside) == len(last) and not (self._step and any(is_idle)):
            return False  # nobody waits for another rank: all compute, or a program makes no steps
        if quiet_s >= BUSY_FACTOR * self._patience_s:
            return True
        return not is_saving and (any(is_idle) or not is_idle)

    # --- stragglers ---

    def _find_straggler(self, now: float) -> list[str]:
        """Note who is at work. After some windows, the sentence if they show one rank, and it is new."""
        places = places_of(self._ranks)
        at_work = [rank for rank, place in places.items() if not place.waits]
        are_few = len(at_work) <= max(1, len(places) // _SHARE_AT_WORK) and len(places) > 1
        self._seen.append([(rank, places[rank]) for rank in at_work] if are_few else [])
        if len(self._seen) % LOOKS:
            return []
        windows = [self._seen[begin : begin + LOOKS] for begin in range(0, len(self._seen), LOOKS)]
        culprits = {_culprit(window) for window in windows}
        rank = culprits.pop()
        if rank is not None and not culprits and len(windows) < WINDOWS:
            return []
        seen, self._seen, self._idle_straggler = self._seen, [], ""
        if rank is None or culprits:
            self._rests_until = now + REST_S
            return []
        self._rests_until = now + REST_OF_NAMED_S
        found = [place for look in seen for each, place in look if each == rank]
        shown = f"in {len(found)} of {len(seen)} looks, {_what(found)}"
        self._idle_straggler = f"{self._ranks.name(rank)} is a straggler: {shown}"
        is_new = rank not in self._named
        self._named.add(rank)
        return [self._idle_straggler] if is_new else []


def _culprit(looks: list[list[tuple[int, Place]]]) -> int | None:
    """The rank that most looks of a window show at work, if they hardly show another."""
    counts = Counter(rank for look in looks for rank, _ in look).most_common(2)
    if not counts or counts[0][1] < _LEAST:
        return None
    is_clear = len(counts) == 1 or counts[1][1] <= _MOST_OF_ANOTHER
    return counts[0][0] if is_clear else None


def _what(places: list[Place]) -> str:
    """Where a rank was at work, and the likely cause."""
    [(where, _)] = Counter(place.text for place in places).most_common(1)
    sentence = f"it is in {where}." if where else "it does not answer."
    if sum(place.state == "D" for place in places) >= _LIKELY * len(places):
        return f"{sentence} The likely cause is its disk."
    if sum(place.loads_data for place in places) >= _LIKELY * len(places):
        return f"{sentence} The likely cause is its data loader."
    return sentence
