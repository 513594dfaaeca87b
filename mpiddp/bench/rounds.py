"""The order in which things that are compared take turns, and how their figures are paired."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def turns(names: Sequence[T], rounds: int, warmup: int = 0) -> Iterator[tuple[int, T]]:
    """Each name once in every round, so that the machine's other work meets all of them alike.

    Yields (round, name). Rounds count from 1; `warmup` rounds come before them, down from 0.
    Every second round is the one before it backwards, and each such pair starts one name later:
    what a turn leaves behind, in caches or on its way to the disk, falls on no name alone.
    """
    for index in range(warmup + rounds):
        start = index // 2 % len(names)
        order = (*names[start:], *names[:start])
        for name in reversed(order) if index % 2 else order:
            yield index + 1 - warmup, name


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """The ratio of each round: both figures of a pair come from the same minute."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]
