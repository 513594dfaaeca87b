"""Stragglers: ranks for which the others keep waiting in collectives, by the record of an attempt."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from mpiddp.launch.judge.calls import Calls, by_group
from mpiddp.launch.judge.events import Record

CHRONIC = 3  # windows in a row that name the same straggler
_LEAST_CALLS = 4  # in a window that is judged
_LEAST_SHARE = 0.25  # of the time, in which the others wait for a straggler
_LEAST_GAP_S = 0.001  # between two ranks: the launcher reads the clocks of hosts no better
_MOST_SLOW = 2 / 3  # of all ranks
_LONGEST_WINDOW_S = 60.0  # of a window with too few calls


def straggler_sentence(
    record: Record, windows: Sequence[Mapping[str, Any]]
) -> tuple[list[int], str]:
    """The ranks that each of the latest CHRONIC windows names, and a sentence about them, or ""."""
    if len(windows) < CHRONIC:
        return [], ""
    windows = windows[-CHRONIC:]
    latest, share = windows[-1]["ranks"], windows[-1]["share"]
    ranks = [rank for rank in latest if all(rank in window["ranks"] for window in windows)]
    are, them = ("is a straggler", "it") if len(ranks) == 1 else ("are stragglers", "them")
    wait = f"the others wait for {them} in {share:.0%} of the time."
    return ranks, f"{record.names(ranks)} {are}: {wait}" if ranks else ""


def window(record: Record, since: float, now: float) -> dict[str, Any] | None:
    """A window of the record, see `find_stragglers`.

    In torch's `join()`, a rank without inputs repeats the collectives of the others and computes nothing, so it
    waits for each of them. No rank is slow in a window that has such a time.
    """
    if record.shadows or record.last_shadowed_at > since:
        return {"ranks": [], "share": 0.0}
    return find_stragglers(record.calls, record.world_size, since, now)


def find_stragglers(
    calls: Calls, world_size: int, since: float, now: float
) -> dict[str, Any] | None:
    """A window: the ranks for which the others wait, slowest first, and the share of the first.

    The share of a rank is the part of the time in which the others have entered a call and this rank has not.
    Returns None if the window has too few calls yet, so that it becomes longer.
    """
    gaps: dict[int, list[tuple[float, float]]] = {}
    times: list[float] = []
    before = 0.0  # the time of the latest call before the window
    for (_, members), ranks in by_group(calls).items():
        if len(ranks) < len(members or range(world_size)):
            continue
        for number in sorted(set.intersection(*(set(made.calls) for made in ranks.values()))):
            entered = sorted((made.calls[number].at, rank) for rank, made in ranks.items())
            if entered[0][0] < since:
                before = max(before, entered[-1][0])
                continue
            times.append(entered[-1][0])
            waits = itertools.pairwise(at for at, _ in entered)
            longest = max(waits, key=lambda wait: wait[1] - wait[0], default=(0.0, 0.0))
            slow = [rank for at, rank in entered if at >= longest[1]]
            if longest[1] - longest[0] >= _LEAST_GAP_S and len(slow) <= _MOST_SLOW * len(entered):
                for rank in slow:
                    gaps.setdefault(rank, []).append(longest)
    if len(times) < _LEAST_CALLS:
        return {"ranks": [], "share": 0.0} if now >= since + _LONGEST_WINDOW_S else None
    began = before or min(times)
    if (length := max(times) - began) <= 0:  # the latest call of another group ended it
        return {"ranks": [], "share": 0.0}
    shares = {rank: _covered(spans, began) / length for rank, spans in gaps.items()}
    largest = max(shares.values(), default=0.0)
    slow = [rank for rank, share in shares.items() if share > largest / 3]
    if largest < _LEAST_SHARE or len(slow) > _MOST_SLOW * world_size:
        return {"ranks": [], "share": 0.0}
    slow.sort(key=lambda rank: (-shares[rank], rank))
    return {"ranks": slow, "share": round(largest, 2)}


def _covered(spans: list[tuple[float, float]], since: float) -> float:
    total, end = 0.0, since
    for began, ended in sorted(spans):
        total += max(0.0, ended - max(began, end))
        end = max(end, ended)
    return total
