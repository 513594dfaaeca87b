"""Compressed lists of hosts and of counts, as Slurm writes them, and the shell of `srun --pty bash`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mpiddp.text import parse_whole, shown

MAX_HOSTS = 1 << 18  # Slurm itself allows fewer in one job
MAX_TASKS = 999_999

_LONGEST_NAME, _MOST_DIGITS = 253, 9
_LAST_NUMBER = re.compile(r"([^.]*?)([0-9]{1,9})([^0-9.]*(?:\..*)?)", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def expand_nodelist(nodelist: str) -> list[str]:
    """`gpu[07-09,12],login` → gpu07, gpu08, gpu09, gpu12, login; several brackets multiply.

    Raises:
        ValueError: any other text, or more than MAX_HOSTS hosts.
    """
    names: list[str] = []
    for pattern in _patterns(nodelist):
        names += _expand_pattern(pattern, MAX_HOSTS - len(names))
    for name in names:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{shown(name)!r} is not the name of a host")
    return names


def compress_names(names: Sequence[str]) -> str:
    """node1, node2, node3, login → "node[1-3],login": each name once, in the order of their first name."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in dict.fromkeys(names):
        # An address is no name with a number: 10.0.0.1 and 10.0.0.2 stay as they are.
        found = None if name[0].isdigit() or ":" in name else _LAST_NUMBER.fullmatch(name)
        key, number = ((found[1], found[3]), found[2]) if found else ((name, ""), "")
        groups.setdefault(key, []).append(number)
    texts = []
    for (before, after), numbers in groups.items():
        ranges: list[list[str]] = []
        for number in sorted(numbers, key=lambda text: (len(text), text)):
            last = ranges[-1][-1] if ranges else ""
            follows = last and number == str(int(last) + 1).zfill(len(last))
            ranges[-1].append(number) if follows else ranges.append([number])
        inside = [run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ranges]
        one = len(numbers) == 1
        texts.append(before + (inside[0] if one else f"[{','.join(inside)}]") + after)
    return ",".join(texts)


def _patterns(nodelist: str) -> Iterator[list[str]]:
    """Split at the commas outside of brackets. Each odd item of a pattern is the text of its brackets."""
    pieces = re.split(r"([\[\]])", nodelist)
    brackets = "".join(pieces[1::2])
    if brackets != "[]" * (len(brackets) // 2):
        raise ValueError("the brackets do not match")
    pattern: list[str] = []
    for index, text in enumerate(pieces[::2]):
        first, *others = [text] if index % 2 else text.split(",")
        pattern.append(first)
        for other in others:
            yield pattern
            pattern = [other]
    yield pattern


def _expand_pattern(pattern: list[str], most: int) -> list[str]:
    if sum(map(len, pattern[::2])) > _LONGEST_NAME:
        raise ValueError(f"a name of more than {_LONGEST_NAME} characters")
    names = [pattern[0]]
    for ranges, tail in zip(pattern[1::2], pattern[2::2], strict=True):
        numbers = _numbers(ranges, most // max(1, len(names)))
        names = [name + number + tail for name in names for number in numbers]
    if len(names) > most:
        raise ValueError(f"more than {MAX_HOSTS} hosts")
    return names


def _numbers(ranges: str, most: int) -> list[str]:
    """`07-09,12` → 07, 08, 09, 12."""
    numbers: list[str] = []
    for item in ranges.split(","):
        first, dash, last = item.partition("-")
        if len(first) > _MOST_DIGITS:
            raise ValueError(f"{shown(first)!r} has more than {_MOST_DIGITS} digits")
        try:
            low = parse_whole(first)
            high = parse_whole(last, low) if dash else low
        except ValueError:
            raise ValueError(f"{shown(item)!r} is not a range such as 07-09") from None
        if high - low >= most - len(numbers):
            raise ValueError(f"more than {MAX_HOSTS} hosts")
        numbers += [str(number).zfill(len(first)) for number in range(low, high + 1)]
    return numbers


def expand_counts(counts: str) -> list[int]:
    """`2(x3),1` → 2, 2, 2, 1.

    Raises:
        ValueError: any other text, more than MAX_HOSTS counts, or a sum above MAX_TASKS.
    """
    expanded: list[int] = []
    total = 0
    for part in counts.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part)
        if match is None:
            raise ValueError(f"{shown(part)!r} is not a count such as 2 or 2(x3)")
        count, times = parse_whole(match[1]), parse_whole(match[2] or "1", 1)
        total += count * times
        if len(expanded) + times > MAX_HOSTS or total > MAX_TASKS:
            raise ValueError(f"{shown(part)!r} is more than Slurm starts")
        expanded += [count] * times
    return expanded


def in_slurm_terminal(env: Mapping[str, str]) -> bool:
    """Whether Slurm's task with these variables is the shell of `srun --pty`, which may launch.

    That is task 0 of its step, and the only one with a terminal.

    SLURM_PTY_PORT alone does not prove it: an srun in that shell passes it on to all of its tasks. Those have
    no terminal. The task is asked for it, and not this process, because a notebook's kernel has none either.
    """
    if "SLURM_PTY_PORT" not in env or env.get("SLURM_PROCID") != "0":
        return False
    return _has_terminal(env.get("SLURM_TASK_PID") or "self")


def _has_terminal(process: str) -> bool:
    try:
        stat = Path("/proc", process, "stat").read_bytes()
    except OSError:  # a container, in which the task has another pid
        return process != "self" and _has_terminal("self")
    # "pid (name) state ppid pgrp session tty_nr …". The name may contain any bytes, including parentheses.
    return stat.rpartition(b")")[2].split()[4] != b"0"
