"""Groups of ranks in few characters: 512 GPUs fit on a screen.

compact([0, 8, 16, 24])  ->  "0-24:8"
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from mpiddp.text import counted

_MOST_PARTS = 6
_SHOWN = 3  # of a long list, and its last entry


def compact(numbers: Sequence[int]) -> str:
    """Ranks or coordinates as Slurm writes them: "0-7", "0-248:8" (every eighth), "0-3,8-11", "5"."""
    if len(numbers) > 2:
        step = numbers[1] - numbers[0]
        if step > 0 and all(second - first == step for first, second in pairwise(numbers)):
            return f"{numbers[0]}-{numbers[-1]}" + (f":{step}" if step > 1 else "")
    parts = [
        str(run[0]) if len(run) == 1 else f"{run[0]}{'-' if len(run) > 2 else ','}{run[-1]}"
        for run in _runs(numbers)
    ]
    if len(parts) > _MOST_PARTS:
        return f"{','.join(parts[:_SHOWN])},…,{parts[-1]} ({counted(len(numbers), 'rank')})"
    return ",".join(parts)


def shortened(entries: Sequence[str], *, all_entries: bool = False) -> list[str]:
    """The first entries and the last one of a long list, with "…" between them."""
    if all_entries or len(entries) <= _SHOWN + 2:
        return list(entries)
    return [*entries[:_SHOWN], "…", entries[-1]]


def _runs(numbers: Sequence[int]) -> list[list[int]]:
    """The numbers in parts of consecutive ones."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs
