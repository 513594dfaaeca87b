"""What benchmarks share: turns, spreads, ratios, tables, and the lines by which ranks send results."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict, TypeVar

from mpiddp.text import align_columns

T = TypeVar("T")
Result = dict[str, Any]  # JSON

PATIENCE_S = 600.0  # of a rank with others, which may still decode or compile
_MARK = "mpiddp-bench: "


class Spread(TypedDict):
    """Of several measurements."""

    median: float
    low: float
    high: float


def emit(result: Mapping[str, Any]) -> None:
    """Send a rank's result: mpirun forwards stdout from every host, so no shared file system is needed."""
    print(_MARK + json.dumps(result), flush=True)


def read_results(lines: Iterable[str]) -> list[Result]:
    """The results among the lines of a job's stdout."""
    marked = (line.partition(_MARK) for line in lines)
    return [json.loads(text) for _, mark, text in marked if mark]


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


def percentile(values: Collection[float], percent: int) -> float:
    """The value that `percent` of all values do not exceed, interpolated linearly.

    Written by hand because `statistics` takes no single value. Raises IndexError for no values.
    """
    ordered = sorted(values)
    index, rest = divmod(percent * (len(ordered) - 1), 100)
    low, high = ordered[index], ordered[index + bool(rest)]
    return low + (high - low) * rest / 100


def spread(values: Sequence[float]) -> Spread:
    """The median, the lowest and the highest of several measurements."""
    return {"median": percentile(values, 50), "low": min(values), "high": max(values)}


def shown(values: Spread, form: str, factor: float = 1.0) -> str:
    """ "1.05 (0.98 to 1.11)"."""
    middle, low, high = (
        format(each * factor, form) for each in (values["median"], values["low"], values["high"])
    )
    return f"{middle} ({low} to {high})"


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A text table with the first column aligned left and the others right."""
    return align_columns([head, *rows], right=range(1, len(head)))
