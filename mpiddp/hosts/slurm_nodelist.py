"""Expand Slurm's compressed lists of hosts and of counts, as found in its variables."""

from __future__ import annotations

import re


def expand_nodelist(nodelist: str) -> list[str]:
    """`gpu[07-09,12],login` → gpu07, gpu08, gpu09, gpu12, login; several brackets multiply."""
    return [
        name
        for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
        for name in _expand_name(part)
    ]


def _expand_name(pattern: str) -> list[str]:
    match = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", pattern)
    if match is None:
        return [pattern]
    head, ranges, tail = match.groups()
    numbers: list[str] = []
    for item in ranges.split(","):
        first, _, last = item.partition("-")
        numbers += [
            str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)
        ]
    return [head + number + rest for number in numbers for rest in _expand_name(tail)]


def expand_counts(counts: str) -> list[int]:
    """`2(x3),1` → 2, 2, 2, 1. Raises ValueError for any other text."""
    expanded: list[int] = []
    for part in counts.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part)
        if match is None:
            raise ValueError(f"{part!r} is not a count such as 2 or 2(x3)")
        expanded += [int(match[1])] * int(match[2] or 1)
    return expanded
