"""Find known failures in a log: in one pass, whatever its bytes are. The root cause comes first.

One regular expression of all texts of the table looks at each byte, and the table then at the lines that have
one of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import BinaryIO

from mpiddp.doctor.failures import FAILURES, Failure, Weight
from mpiddp.text import escaped

_BLOCK_BYTES = 1 << 20
_BLOCK_LINES = 1000
_LONGEST_LINE = 1 << 16  # bytes; what is cut off is searched as a line of its own
_AROUND = 500  # bytes of a line on each side of a text that a pattern sees
_SHOWN = 160  # characters of a line
# A rank's exception is as near to the cause as a symptom: the first of both in a log comes first.
_ORDER = {Weight.CAUSE: 0, Weight.SYMPTOM: 1, Weight.EXCEPTION: 1, Weight.CONSEQUENCE: 2}
# What launchers write before a rank's line: "[rank1]: ", "[1,0]<stderr>:", "[3] ", "3: ", and colours.
_PREFIX = re.compile(r"\A(\x1b\[[0-9;]*m|\[[^][]{1,60}\](<std\w+>)?:? ?|\d+: |<std\w+>: ?)+")


@dataclass(frozen=True)
class Explanation:
    """A known failure in a log, and the first line that shows it.

    Attributes:
        failure: the row of the table, with cause and mend.
        number: the line's number, from 1.
        line: the line, or its part around the match, without effects on a terminal.
    """

    failure: Failure
    number: int
    line: str


def explain(lines: Iterable[str]) -> Explanation | None:
    """The root cause that the lines show, as far as it is known; None if nothing is."""
    found = explain_all(lines)
    return found[0] if found else None


def explain_all(lines: Iterable[str]) -> list[Explanation]:
    """All known failures that the lines show, each once, the root cause first. A line may lack its end."""
    return _explained(_joined(lines))


def explain_file(file: BinaryIO) -> list[Explanation]:
    """`explain_all` for the bytes of a file or a pipe, in little memory."""
    return _explained(_read(file))


def _joined(lines: Iterable[str]) -> Iterator[bytes]:
    rest = iter(lines)
    while block := list(islice(rest, _BLOCK_LINES)):
        text = "".join(line if line.endswith("\n") else f"{line}\n" for line in block)
        yield text.encode("utf-8", "backslashreplace")


def _read(file: BinaryIO) -> Iterator[bytes]:
    while block := file.read(_BLOCK_BYTES):
        yield block + file.readline(_LONGEST_LINE)


def _explained(blocks: Iterable[bytes]) -> list[Explanation]:
    found: dict[str, Explanation] = {}
    lines_before = 0
    for block in blocks:
        at = 0
        while match := _TEXTS.search(block, at):
            line, at = _line(block, *match.span())
            for failure in _shown_by(line):
                if failure.id not in found:
                    number = lines_before + block.count(b"\n", 0, match.start()) + 1
                    found[failure.id] = Explanation(failure, number, _shown(line, failure))
        lines_before += block.count(b"\n")
    if all(each.failure.weight == Weight.EXCEPTION for each in found.values()):
        return []  # nothing says that the job failed; a script may print exceptions that it handles
    return sorted(found.values(), key=lambda each: (_ORDER[each.failure.weight], each.number))


def _shown_by(line: str) -> list[Failure]:
    """The rows that the line shows. An exception that another row knows is that row's alone."""
    shown = [
        failure
        for failure in FAILURES
        if any(text in line for text in failure.says)
        and (not failure.pattern or re.search(failure.pattern, line))
    ]
    known = [failure for failure in shown if failure.weight != Weight.EXCEPTION]
    return known or shown


def _line(block: bytes, start: int, end: int) -> tuple[str, int]:
    """The line around a match, at most _AROUND bytes on each side, and where to go on. \\r ends lines too."""
    before = block[max(0, start - _AROUND) : start]
    after = block[end : end + _AROUND]
    before = before[max(before.rfind(b"\n"), before.rfind(b"\r")) + 1 :]
    after = re.split(rb"[\r\n]", after, maxsplit=1)[0]
    line = (before + block[start:end] + after).decode("utf-8", "replace").strip("\0")
    return _PREFIX.sub("", line).strip(), end + len(after)


def _shown(line: str, failure: Failure) -> str:
    """The part of a line that has a row's text, short enough to print."""
    at = max(line.find(text) for text in failure.says)
    start = max(0, min(at - _SHOWN // 4, len(line) - _SHOWN))
    shown = line[start : start + _SHOWN]
    return escaped("…" * (start > 0) + shown + "…" * (start + _SHOWN < len(line)))


def _any_of(texts: Sequence[bytes]) -> bytes:
    """A pattern for any of the texts, by their common beginnings: faster than one alternative a text."""
    rests: dict[bytes, list[bytes]] = {}
    for text in texts:
        rests.setdefault(text[:1], []).append(text[1:])
    if b"" in rests:
        return b""
    branches = [re.escape(first) + _any_of(rest) for first, rest in rests.items()]
    return branches[0] if len(branches) == 1 else b"(?:" + b"|".join(branches) + b")"


_TEXTS = re.compile(_any_of([text.encode() for failure in FAILURES for text in failure.says]))
