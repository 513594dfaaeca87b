"""Ranks that hold the others up while they use no core: they load data, wait for a disk or a link, or sleep.

Only their stacks show them. While all ranks mostly wait, the launcher looks at the stacks about once a
second, at random moments: others would fall on the same part of every step. A rank that is at work in many
looks, and alone, holds the others up. A look costs a rank a few milliseconds, so there is a rest after some.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from mpiddp.launch.monitor.places import Place, places_of
from mpiddp.launch.monitor.ranks import Ranks
from mpiddp.launch.monitor.skew import all_wait
from mpiddp.text import duration

LOOKS = 10  # of a window
WINDOWS = 3  # in a row that blame the same rank, or the same link
REST_S, REST_OF_BLAMED_S = 60.0, 300.0
PAUSE_S, PAUSE_STEPS = 3.0, 10  # without a step: the longer of these is a pause
_LEAST, _MOST_OF_ANOTHER = 0.4, 0.1  # of a window's looks that blame the rank, and any other one
_SHARE_AT_WORK = 4  # at most every fourth rank is, if the others wait for these
_MOST_OF_ANOTHER_LINK = 0.7  # of the looks that blame the link of a host
_LIKELY = 0.5  # of the looks that blame a rank, for its cause


class _Window:
    """What a number of looks have shown.

    Attributes:
        blamed: the name and the place of each rank that a look blames.
        ends: of each look at which all ranks wait while data wait to be sent: the addresses that all these
            data go from or to.
    """

    def __init__(self) -> None:
        self.looks = 0
        self.blamed: list[tuple[str, Place]] = []
        self.ends: list[set[str]] = []

    def add(self, places: Mapping[int, Place], ranks: Ranks, host_of: dict[str, str]) -> None:
        """Note a look. `host_of` has the hosts of the addresses that are known."""
        self.looks += 1
        for rank, place in places.items():
            host_of.update((own, ranks.host_of(rank)) for own, _ in place.unsent)
        at_work = [rank for rank, place in places.items() if not place.waits]
        if 0 < len(at_work) <= max(1, len(places) // _SHARE_AT_WORK) and len(places) > 1:
            self.blamed += [(ranks.name(rank), places[rank]) for rank in at_work]
        full = [pair for place in places.values() for pair in place.unsent]
        if full and not at_work:
            self.ends.append(set.intersection(*map(set, full)))

    def culprit(self, host_of: Mapping[str, str]) -> str:
        """The rank, or the link, that most looks blame, if they hardly blame another; else ""."""
        least = _LEAST * self.looks
        counts = Counter(name for name, _ in self.blamed).most_common(2)
        if counts and counts[0][1] >= least:
            is_clear = len(counts) == 1 or counts[1][1] <= _MOST_OF_ANOTHER * self.looks
            return counts[0][0] if is_clear else ""
        ends = Counter(
            host for each in self.ends for host in {host_of.get(end, end) for end in each}
        )
        most = max(ends.values(), default=0)
        hosts = sorted(host for host, count in ends.items() if count > _MOST_OF_ANOTHER_LINK * most)
        if most < least or not 0 < len(hosts) <= 2:
            return ""
        return f"the link {'between' if hosts[1:] else 'of'} {' and '.join(hosts)}"


def _what(places: Sequence[Place]) -> str:
    """What the looks that blame one have shown, and the likely cause. A link has no places."""
    if not places:
        return "all ranks wait while data wait to be sent there. The likely cause is the network."
    [(where, _)] = Counter(place.text for place in places).most_common(1)
    sentence = f"it is in {where}." if where else "it does not answer."
    is_likely = _LIKELY * len(places)
    if sum(place.is_in_disk for place in places) >= is_likely:
        return f"{sentence} The likely cause is its disk."
    if sum(place.loads_data for place in places) >= is_likely:
        return f"{sentence} The likely cause is its data loader."
    return sentence


class LookWatch:
    """Decides when to look at the stacks of ranks that make steps, and says who holds the others up.

    Times are those of the caller's clock, in seconds.

    Attributes:
        holder: a sentence about who holds the others up; "" if nobody does.
        pause: a sentence about the latest step that took much longer than the others; "" if there was none.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.holder = self.pause = ""
        self._windows = [_Window()]
        self._host_of: dict[str, str] = {}  # by address
        self._rests_until = 0.0
        self._named: set[str] = set()
        self._in_pause = _Window()
        self._step, self._step_at = 0, 0.0  # the newest
        self._step_s: float | None = None  # a usual one

    def is_due(self, now: float) -> bool:
        """Whether to look at the stacks now. Call this about once a second, at random moments."""
        self._note_steps()
        if self._is_pause(now):
            return self._in_pause.looks < LOOKS
        if not all_wait(self._ranks.paces):
            self.holder = ""
            return False
        return now >= self._rests_until

    def look(self, now: float) -> list[str]:
        """Note the stacks, which are there. Returns a sentence if they show who holds the others up."""
        places = places_of(self._ranks)
        self._note_steps()
        if self._is_pause(now):
            self._in_pause.add(places, self._ranks, self._host_of)
            return []
        self._windows[-1].add(places, self._ranks, self._host_of)
        if self._windows[-1].looks < LOOKS:
            return []
        culprit = self._windows[-1].culprit(self._host_of)
        if not culprit or culprit != self._windows[0].culprit(self._host_of):
            self.holder = ""
        elif len(self._windows) < WINDOWS:
            self._windows.append(_Window())
            return []
        else:
            self.holder = self._sentence(culprit)
        self._windows = [_Window()]
        self._rests_until = now + (REST_OF_BLAMED_S if self.holder else REST_S)
        if not self.holder or culprit in self._named:
            return []
        self._named.add(culprit)
        return [self.holder]

    def _sentence(self, culprit: str) -> str:
        blamed = [at for window in self._windows for name, at in window.blamed if name == culprit]
        looks = sum(window.looks for window in self._windows)
        found = len(blamed) or sum(len(window.ends) for window in self._windows)
        return f"{culprit} holds the others up: in {found} of {looks} looks, {_what(blamed)}"

    def _is_pause(self, now: float) -> bool:
        if self._step_s is None or self._ranks.saving or self._ranks.done:
            return False
        return now - self._step_at >= max(PAUSE_S, PAUSE_STEPS * self._step_s)

    def _note_steps(self) -> None:
        step, at = max(self._ranks.steps.values(), default=(0, 0.0))
        if step == self._step:
            return
        window, self._in_pause = self._in_pause, _Window()
        if culprit := window.culprit(self._host_of):
            blamed = [place for name, place in window.blamed if name == culprit]
            self.pause = (
                f"{culprit} held the others up once, for {duration(at - self._step_at)} after step "
                f"{self._step}: {_what(blamed)}"
            )
        elif 0 < self._step < step and not window.looks:
            self._step_s = (at - self._step_at) / (step - self._step)
        self._step, self._step_at = step, at
