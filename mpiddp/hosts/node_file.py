"""The host lists of schedulers, rewritten as lines of a hostfile.

PBS and LSF write one line per slot, so that hosts repeat. Grid Engine writes four columns. Both come as
`--hostfile $PBS_NODEFILE` and `--hostfile $PE_HOSTFILE` too, and are recognized by their form.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from mpiddp.errors import UserError
from mpiddp.text import counted, shown

Line = tuple[int, list[str]]  # the number of a line, and its tokens

_MOST_SHOWN = 8


def as_hostfile(lines: Sequence[Line], source: str) -> Sequence[Line]:
    """The lines of a node file or of a PE_HOSTFILE as `host slots=N`. Other lines stay as they are.

    A node file without a repeated host stays as it is, too: its hosts have no slot count.

    Raises:
        UserError: a node file repeats its hosts unevenly.
    """
    if all(_is_of_grid_engine(tokens) for _, tokens in lines):
        return _with_sums([(number, tokens[0], int(tokens[1])) for number, tokens in lines])
    if all(len(tokens) == 1 and not set(tokens[0]) & set(":@=[") for _, tokens in lines):
        merged = _with_sums([(number, tokens[0], 1) for number, tokens in lines])
        if len(merged) < len(lines):
            _check_even(merged, source)
            return merged
    return lines


def of_counts(text: str) -> Sequence[Line]:
    """LSF's "node1 4 node2 4" as `host slots=N`.

    Raises:
        ValueError: any other text.
    """
    names, counts = text.split()[::2], text.split()[1::2]
    if not names or len(names) != len(counts):
        raise ValueError("it does not have a number after each host")
    for count in counts:
        if not _is_count(count):
            raise ValueError(f"{shown(count)!r} is not a number of slots")
    return _with_sums([(0, name, int(count)) for name, count in zip(names, counts, strict=True)])


def _is_of_grid_engine(tokens: Sequence[str]) -> bool:
    """Whether these are the columns of sge_pe(5): host, slots, queue instance, processors."""
    return len(tokens) >= 3 and _is_count(tokens[1]) and "@" in tokens[2]


def _is_count(text: str) -> bool:
    return re.fullmatch("[0-9]{1,6}", text) is not None


def _with_sums(entries: Sequence[tuple[int, str, int]]) -> list[Line]:
    """One line for each host, at the place of its first entry, with the sum of its slots."""
    sums: dict[str, int] = {}
    first: dict[str, tuple[int, str]] = {}
    for number, name, slots in entries:
        key = name.lower()
        sums[key] = sums.get(key, 0) + slots
        first.setdefault(key, (number, name))
    return [(number, [name, f"slots={sums[key]}"]) for key, (number, name) in first.items()]


def _check_even(lines: Sequence[Line], source: str) -> None:
    slots = {tokens[0]: int(tokens[1].removeprefix("slots=")) for _, tokens in lines}
    most, fewest = max(slots, key=slots.__getitem__), min(slots, key=slots.__getitem__)
    if slots[most] == slots[fewest]:
        return
    example = "in a hostfile: " + f"{fewest} slots={slots[fewest]}"
    if len(slots) <= _MOST_SHOWN:
        example = "-H " + ",".join(f"{name}:{count}" for name, count in slots.items())
    raise UserError(
        f"{source}: {shown(most)} is listed {counted(slots[most], 'time')}, but {shown(fewest)} "
        f"{counted(slots[fewest], 'time')}. If the hosts should take different numbers of ranks, "
        f"write them: {example}"
    )
