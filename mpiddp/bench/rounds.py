"""The order in which compared variants alternate, and the ratios of their figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def turns(names: Sequence[T], rounds: int, warmup: int = 0) -> Iterator[tuple[int, T]]:
    """Yield (round, name), each name once per round, so that other load affects all of them equally.

    Rounds count from 1; `warmup` rounds come before them, numbered down from 0. Every second round has
    the reverse order of the round before, and each such pair starts one name later. So the after-effects
    of a turn, in caches or pending writes, do not always hit the same name.
    """
    for index in range(warmup + rounds):
        start = index // 2 % len(names)
        order = (*names[start:], *names[:start])
        for name in reversed(order) if index % 2 else order:
            yield index + 1 - warmup, name


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """The ratio in each round, whose two figures were measured shortly after each other."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]
