"""Text that several modules parse or print: lists, counts, durations, tables, similar names."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

_K = TypeVar("_K")
_V = TypeVar("_V", bound=Hashable)
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}
_BILLION = 10**9  # no count of ranks, steps or images is larger
MAX_DURATION_DAYS = 1000
# Control characters but the tab, ends of lines, and marks that change the direction of text.
_CONTROLS = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def escaped(text: str, *, keep: str = "") -> str:
    """The text without effects on a terminal: "\\x1b" for an escape character. `keep` is left as it is."""
    return _CONTROLS.sub(lambda match: match[0] if match[0] in keep else repr(match[0])[1:-1], text)


FIX = "  fix: "  # the beginning of the line below a sentence, with the command that mends it


_typed_hosts = ["HOSTFILE"]  # as the user has typed them for the command of this process


def remember_hosts(typed: str) -> None:
    """Let fixes name the hosts as the user has typed them: "-H node1,node2", a file, or "" for an allocation."""
    _typed_hosts[:] = [typed]


def for_these_hosts(fix: str) -> str:
    """The fix with the hosts of this process, or a job's rank, in place of the word HOSTFILE."""
    typed = f" {_typed_hosts[0]}".rstrip()
    return re.sub(r" HOSTFILE\b", lambda _: typed, fix)


def with_fix(sentence: str, fix: str) -> str:
    """The sentence, and below it the command that mends it, or what to change; "" for none."""
    return f"{sentence}\n{FIX}{for_these_hosts(fix)}" if fix else sentence


def parts(text: str) -> list[tuple[str, str]]:
    """Each sentence of a text, with the command below it, or ""."""
    pairs = (part.partition(f"\n{FIX}") for part in re.split(f"\n(?!{FIX})", text))
    return [(sentence, fix.replace(FIX, "")) for sentence, _, fix in pairs]


def sentence_and_fix(text: str) -> tuple[str, str]:
    """The sentences of a text, each on its line, and the commands that stand below them, each once."""
    sentences, fixes = zip(*parts(text), strict=True)
    return "\n".join(sentences), "\n".join(dict.fromkeys(filter(None, fixes)))


def listed(names: Sequence[str], most: int = 8) -> str:
    """ "a, b, and 7 more": the first names of a long list, short enough for an error."""
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def all_of(names: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def keys_by_value(values: Mapping[_K, _V]) -> dict[_V, list[_K]]:
    """{"1": ["a", "b"], "2": ["c"]} for {"a": "1", "b": "1", "c": "2"}."""
    keys: dict[_V, list[_K]] = {}
    for key, value in values.items():
        keys.setdefault(value, []).append(key)
    return keys


def differences(what: str, values: Mapping[str, object]) -> str:
    """ "torch is 2.12.1 on node2, 2.13.0 on the other 15 hosts"; "" if all are equal."""
    groups = keys_by_value({name: str(value) for name, value in values.items()})
    most = max(map(len, groups.values()), default=0)
    if len(groups) < 2:
        return ""
    if 2 * most <= len(values):  # no majority
        every = [f"{value} on {all_of(names)}" for value, names in groups.items()]
        return f"{what} differs: {', '.join(every)}"
    odd = [f"{value} on {all_of(names)}" for value, names in groups.items() if len(names) < most]
    (usual,) = [value for value, names in groups.items() if len(names) == most]
    return f"{what} is {', '.join(odd)}, {usual} on the other {counted(most, 'host')}"


def signal_name(number: int) -> str:
    """ "SIGKILL". Most real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def counted(number: int, noun: str) -> str:
    """ "1 host", "2 hosts"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def shown(text: str) -> str:
    """Input as an error shows it: on one line, printable and short."""
    text = text if text.isprintable() else ascii(text[:100])[1:-1]
    return text if len(text) <= 60 else f"{text[:57]}..."


def parse_whole(text: str, low: int = 0, high: int = _BILLION) -> int:
    """The whole number in `text`, in [low, high).

    Raises ValueError for any other text. Its message is the expectation: "a whole number, 1 or more".
    """
    digits = text.lstrip("0")[:20] or "0"  # more digits are too large, and int() refuses 4,301
    number = int(digits) if text.isascii() and text.isdigit() else -1
    if not low <= number < high:
        bound = f" and less than {high}" if number >= high else ""
        raise ValueError(f"a whole number, {low} or more{bound}")
    return number


def parse_duration(text: str) -> float:
    """The seconds in "90", "90s", "55m" or "1.5h". Raises ValueError for any other text, and for 0."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)([smh]?)", text, re.ASCII)
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if not 0 < seconds <= MAX_DURATION_DAYS * 86400:
        raise ValueError(
            f"{shown(text)!r} is not a duration such as 90, 90s, 55m or 1.5h, of at most {MAX_DURATION_DAYS} days"
        )
    return seconds


def parse_interval(text: str) -> int | float:
    """An int of steps for `20`, a float of seconds for `30s` or `1.5h`. Raises ValueError otherwise."""
    if text.endswith(("s", "m", "h")):
        return parse_duration(text)
    try:
        return parse_whole(text, 1)
    except ValueError as error:
        raise ValueError(f"{shown(text)!r} is not {error}, and not a duration") from None


def from_here(path: str | Path) -> str:
    """The path as a user in the working folder would type it."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except (OSError, ValueError):  # the working folder is gone, or the path is not below it
        return str(path)


def duration(seconds: float) -> str:
    """ "40 s", "12 min" or "3.5 h"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def seconds(value: float) -> str:
    """ "1.2 s" or "38 ms"."""
    return f"{value:.1f} s" if value >= 1 else f"{value * 1000:.3g} ms"


def size_text(size: float) -> str:
    """ "950 B", "12.3 kB", "1.2 GB", "3.4 TB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.{0 if unit == 'B' else 1}f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def as_json(kind: str, facts: Mapping[str, object]) -> str:
    """The document of every --json and --report FILE: its kind and the version of its keys come first."""
    import json

    return json.dumps({"kind": kind, "version": 1, **facts}, indent=2)


def align_columns(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> str:
    """A table with one line per row and two spaces between columns. `right`: columns to align right."""
    columns = list[list[str]]()
    for index, column in enumerate(zip(*rows, strict=True)):
        align, width = str.rjust if index in right else str.ljust, max(map(len, column))
        columns.append([align(cell, width) for cell in column])
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """' Did you mean "launch"?' for "lauch"; "" if no name is similar."""
    from difflib import get_close_matches  # imported here because only an error needs it

    nearest = get_close_matches(name, list(names), n=1, cutoff=0.8)  # as similar as a typo
    return f' Did you mean "{nearest[0]}"?' if nearest else ""
