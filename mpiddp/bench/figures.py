"""The parts that benchmarks share: options, turns, ratios, tables, and the lines of results of ranks.

The options of a benchmark are the fields of its dataclass `Options`:

    rounds: int = option("rounds of all sizes", type=whole(1), default=3)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from statistics import median
from typing import Any, TypeVar

from mpiddp.arguments import whole
from mpiddp.text import align_columns

T = TypeVar("T")
Result = dict[str, Any]  # JSON

_MARK = "mpiddp-bench: "


def option(help: str, **keywords: Any) -> Any:
    """A field that is an option. `keywords` are argparse's."""
    return field(metadata={"help": help, **keywords})


def wholes(low: int) -> Callable[[str], tuple[int, ...]]:
    """A parser for ascending lists of whole numbers such as 1,2,4."""
    return lambda text: tuple(sorted({whole(low)(part) for part in text.split(",")}))


def emit(result: Mapping[str, Any]) -> None:
    """Send a rank's result: mpirun forwards stdout from every host, so no shared file system is needed."""
    print(_MARK + json.dumps(result), flush=True)


def read_results(lines: Iterable[str]) -> list[Result]:
    """The results among the lines of a job's stdout."""
    marked = (line.partition(_MARK) for line in lines)
    return [json.loads(text) for _, mark, text in marked if mark]


def turns(names: Sequence[T], rounds: int, warmup: int = 0) -> Iterator[tuple[int, T]]:
    """Yield (round, name), each name once per round, so that other load affects all of them equally.

    Rounds count from 1; the numbers of the `warmup` rounds before them end with 0. Every second round has the
    reverse order of the round before, and each such pair starts one name later. So the after-effects of a
    turn, in caches or pending writes, do not always hit the same name.
    """
    for index in range(warmup + rounds):
        start = index // 2 % len(names)
        order = (*names[start:], *names[:start])
        for name in reversed(order) if index % 2 else order:
            yield index + 1 - warmup, name


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """The ratio of each round, in which both figures were measured shortly after each other."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def spread(values: Sequence[float], form: str) -> str:
    """The median, the lowest and the highest of several measurements: "1.05 (0.98 to 1.11)"."""
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A text table with the first column aligned left and the others right."""
    return align_columns([head, *rows], right=range(1, len(head)))
