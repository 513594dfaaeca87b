"""Ranks that hold the others up while they use no core: they load data, wait for a disk, or sleep.

Only their stacks show them. While all ranks mostly wait, the launcher looks at the stacks about once a
second, at random moments: others would fall on the same part of every step. A rank that is at work in many
looks, and alone, holds the others up. A look costs a rank a few milliseconds, so there is a rest after some.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mpiddp.launch.monitor.places import Place, places_of
from mpiddp.launch.monitor.ranks import Ranks
from mpiddp.launch.monitor.skew import all_wait

LOOKS = 10  # of a window
WINDOWS = 3  # in a row that blame the same rank
REST_S, REST_OF_BLAMED_S = 60.0, 300.0
_LEAST, _MOST_OF_ANOTHER = 0.4, 0.1  # of a window's looks that blame the rank, and any other one
_SHARE_AT_WORK = 4  # at most every fourth rank is, if the others wait for these
_LIKELY = 0.5  # of the looks that blame a rank, for its cause


class LookWatch:
    """Decides when to look at the stacks of ranks that make steps, and says who holds the others up.

    Times are those of the caller's clock, in seconds.

    Attributes:
        holder: a sentence about who holds the others up; "" if nobody does.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.holder = ""
        self._windows: list[list[tuple[str, Place]]] = [
            []
        ]  # the name and place of each blamed rank
        self._looks = 0  # in the last window
        self._rests_until = 0.0
        self._named: set[str] = set()

    def is_due(self, now: float) -> bool:
        """Whether to look at the stacks now. Call this about once a second, at random moments."""
        if not all_wait(self._ranks.paces):
            self.holder = ""
            return False
        return now >= self._rests_until

    def look(self, now: float) -> list[str]:
        """Note the stacks, which are there. Returns a sentence if they show who holds the others up."""
        places = places_of(self._ranks)
        at_work = [rank for rank, place in places.items() if not place.waits]
        if 0 < len(at_work) <= max(1, len(places) // _SHARE_AT_WORK) and len(places) > 1:
            self._windows[-1] += [(self._ranks.name(rank), places[rank]) for rank in at_work]
        self._looks += 1
        if self._looks < LOOKS:
            return []
        self._looks = 0
        culprit = _culprit(self._windows[-1])
        if not culprit or culprit != _culprit(self._windows[0]):
            self.holder = ""
        elif len(self._windows) < WINDOWS:
            self._windows.append([])
            return []
        else:
            blamed = [at for window in self._windows for name, at in window if name == culprit]
            found = f"in {len(blamed)} of {WINDOWS * LOOKS} looks, {_what(blamed)}"
            self.holder = f"{culprit} holds the others up: {found}"
        self._windows = [[]]
        self._rests_until = now + (REST_OF_BLAMED_S if self.holder else REST_S)
        if not self.holder or culprit in self._named:
            return []
        self._named.add(culprit)
        return [self.holder]


def _culprit(blamed: Sequence[tuple[str, Place]]) -> str:
    """The rank that most looks of a window blame, if they hardly blame another; else ""."""
    counts = Counter(name for name, _ in blamed).most_common(2)
    if not counts or counts[0][1] < _LEAST * LOOKS:
        return ""
    is_clear = len(counts) == 1 or counts[1][1] <= _MOST_OF_ANOTHER * LOOKS
    return counts[0][0] if is_clear else ""


def _what(places: Sequence[Place]) -> str:
    """What the looks that blame a rank have shown, and the likely cause."""
    [(where, _)] = Counter(place.text for place in places).most_common(1)
    sentence = f"it is in {where}." if where else "it does not answer."
    is_likely = _LIKELY * len(places)
    if sum(place.is_in_disk for place in places) >= is_likely:
        return f"{sentence} The likely cause is its disk."
    if sum(place.loads_data for place in places) >= is_likely:
        return f"{sentence} The likely cause is its data loader."
    return sentence
