"""Why a job failed, from its log.

The launcher's own sentence decides, and without one the known text that is nearest to a cause. What a restart
has survived is forgotten, and what later steps of training have survived is only "also seen". Tracebacks are
not followed: the last line of one is a line like any other. One regular expression finds the lines with a
known text, because a log may have millions of lines.
"""

from __future__ import annotations

import io
import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, groupby
from typing import BinaryIO

from mpiddp.explain.failures import FAILURES, ROWS, Failure, Weight
from mpiddp.text import FIX, escaped

_LONGEST_LINE = 1 << 13  # bytes; the rest is searched as a line of its own
_SHOWN = 160  # characters of a line that are printed
_SURVIVED_STEPS = 2  # a job that makes so many steps after a failure has survived it
_END_LINES = 50  # in the last lines of a log, a job may say that it has ended well

# In front of a line of a rank: the time of --timestamps, journald or kubectl logs --timestamps, and then the
# launcher's "[rank1]: ", "[1,0]<stderr>:", "[3] ", "3: ".
_PREFIX = re.compile(
    r"(?:\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d\S* |[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S+ \S+\[\d+\]: )?"
    r"(?:\[[^][]{1,60}\](?:<std\w+>)?:? ?|\d+: |<std\w+>: ?)*"
)
_COLOURS = re.compile(rb"\x1b\[[0-9;?]*[a-zA-Z]")
_QUOTED = re.compile(r"\"[^\"]*\"|`[^`]*`|(?<!\w)'[^']*'(?!\w)")  # a tip may quote another error
_QUOTE = re.compile("[\"'`]")

OURS = "mpiddp: "
_STOPPED = (f"{OURS}stopped on request", f"{OURS}interrupted")
_RESUME = f"{OURS}to resume: "
# The sentences with which the launcher ends a job that has failed (`mpiddp.launch.judge.verdict`).
# test_no_verdict_is_overruled has one of each kind.
_VERDICT = re.compile(
    r"mpiddp: (?:.* Then )?"
    r"(?:rank \d+ on \S+ (?:failed first|ended first, with exit code \d+): (?P<error>.*?)"
    r"(?: \(its traceback: [^)]*\))?\.?(?: The (?:other ranks were stopped\.|same error ended .*))?"
    r"|(?:rank \d+ on \S+ (?:ended first|was killed by|ended before)|the job (?:failed|hung)|lost \S+ \("
    r"|the connection of|mpirun could not start|the ranks on .* ended at the same moment"
    r"|only \d+ of \d+ ranks).*|.* The other ranks were stopped\.)"
)
# A line that a job prints while it trains.
_STEP = re.compile(rb"(?i)\b(?:step|epoch|iter|iteration|loss)\b\W{0,3}\d|\dit/s")
# A line that a job prints if it has ended well.
_WELL = re.compile(
    rb"(?im)\b(?:training|run|job|fit|everything|all)\b.{0,30}"
    rb"\b(?:complete|completed|finished|done|succeeded|successful|successfully)\b|^\W*done\b"
)

_BY_ID = {row.id: row for row in ROWS}
_OWN_ERROR, _RANK_ENDED = _BY_ID["own-error"], _BY_ID["rank-ended"]
_PYTHON = ("hang", "quiet", "interrupted", "left-early")
_HANG, _QUIET, _INTERRUPT, _LEFT_EARLY = (_BY_ID[f"python-{name}"] for name in _PYTHON)
# Texts with the same first character share a branch, because that is faster than one alternative for each text.
_BRANCHES = groupby(
    sorted([OURS, FIX, *(text for row in ROWS for text in row.says)]), key=lambda text: text[0]
)
_TEXTS = re.compile(
    "|".join(
        f"{re.escape(first)}(?:{'|'.join(re.escape(text[1:]) for text in texts)})"
        for first, texts in _BRANCHES
    ).encode()
)

# Explanations are sorted by these numbers. What steps of training have survived comes before or after the consequences.
_PLACE: dict[Weight, float] = {
    Weight.ROOT: 0.5,
    Weight.CAUSE: 1,
    Weight.SYMPTOM: 3,
    Weight.EXCEPTION: 3,
    Weight.CONSEQUENCE: 5,
}
_PLACE_OF_VERDICT = {**_PLACE, Weight.CAUSE: 0, Weight.SYMPTOM: 2, Weight.EXCEPTION: 0}


@dataclass(frozen=True)
class Explanation:
    """A known failure in a log, and the first line that shows it."""

    failure: Failure
    number: int  # the number of the line, from 1
    line: str  # the line or its part around the match, safe to print on a terminal

    @property
    def fix(self) -> str:
        """What to do, with the words of the line that the groups of the row's pattern have, such as NAME."""
        words, fix = re.search(self.failure.pattern, self.line), self.failure.fix
        for name, word in words.groupdict().items() if words else ():
            fix = fix.replace(name, word)
        return fix


def explain(lines: Iterable[str]) -> Explanation | None:
    """The root cause of a job that has failed, as far as these lines show it; None if they show none."""
    text = "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)
    log = explain_file(io.BytesIO(text.encode("utf-8", "backslashreplace")))
    return next(iter(log.explanations), None)


def explain_file(file: BinaryIO) -> Log:
    """Read a log from a file or a pipe, in little memory."""
    log, number = Log(), 1
    while piece := file.readline(_LONGEST_LINE):
        # A progress bar ends its lines by \r. They are read one by one, and have the same number.
        for line in (_COLOURS.sub(b"", piece) if b"\x1b[" in piece else piece).splitlines():
            log.read(number, line)
        number += piece.endswith(b"\n")
    return log


class Log:
    """One pass through a log, which keeps only the lines that show a failure."""

    def __init__(self) -> None:
        self.last_sentence = ""  # the last line of mpiddp
        self._begin_attempt()

    def _begin_attempt(self) -> None:
        self.stop: tuple[int, str] | None = None  # the line about a stop on request
        self.resume = ""  # the command that resumes a stopped job
        # By id, the first line since the job has made steps, and those before these steps.
        self._rows: dict[str, Explanation] = {}
        self._survived: dict[str, Explanation] = {}
        self._verdict: Explanation | None = None
        self._steps = 0  # of training, since the last line that shows a failure
        self._end = deque[bytes](maxlen=_END_LINES)  # the last lines since that line

    def read(self, number: int, line: bytes) -> None:
        """Look at a line with a known text, and count the steps of training between such lines."""
        if _TEXTS.search(line) and self._take(number, *_split(line)):
            self._steps = 0
            self._end.clear()
            return
        self._end.append(line)
        self._steps += self._steps < _SURVIVED_STEPS and bool(_STEP.search(line))

    def _take(self, number: int, prefix: str, text: str) -> bool:
        """Keep what a line shows. Returns whether it shows a failure, or the end of the job."""
        if text.startswith(FIX) and self.last_sentence:  # it belongs to the sentence above
            text = f"{self.last_sentence}{text}"
        is_ours = text.startswith(OURS)
        verdict = _VERDICT.fullmatch(text) if is_ours else None
        rows = _shown_by(text)
        if is_ours:
            self.last_sentence = text
            if text.startswith(f"{OURS}restarting on "):  # the job has survived all before it
                self._begin_attempt()
                return False
        if self._steps >= _SURVIVED_STEPS and (rows or verdict or text.startswith(_STOPPED)):
            self._survived = {**self._rows, **self._survived}
            self._rows, self._verdict, self.stop = {}, None, None
        if text.startswith(_RESUME):
            self.resume = text.removeprefix(_RESUME)
        elif text.startswith(_STOPPED) and self._verdict is None:  # else the job hung before
            self.stop = number, escaped(text)
        elif is_ours and (verdict or self._verdict):
            self._take_verdict(number, text, verdict)
            return True
        for row in rows:
            explanation = _explained(row, number, text)
            self._rows.setdefault(row.id, explanation)
            if row is _OWN_ERROR and not prefix:  # of one process, the last one has ended it
                self._rows[row.id] = explanation
            elif row is _HANG:  # a quiet job has only been named, and may go on
                self._verdict, self.stop = explanation, None
        return bool(rows)

    def _take_verdict(self, number: int, text: str, verdict: re.Match[str] | None) -> None:
        """Take a verdict of the launcher, or a sentence below it, such as one with a known cause."""
        if verdict is None:
            says_cause = (row for row in FAILURES if row.cause in text or f" {row.id}" in text)
            hangs = (row for row in _shown_by(text) if row in (_HANG, _QUIET))
            row = next(chain(says_cause, hangs), None)
        else:
            error = verdict["error"]
            self._rows.pop(_QUIET.id, None)  # the job went on after it
            rows = _shown_by(error or text, Weight.EXCEPTION) or [_OWN_ERROR] * bool(error)
            row = next((row for row in rows if row.weight != Weight.CONSEQUENCE), _RANK_ENDED)
            if row.weight in (Weight.SYMPTOM, Weight.CONSEQUENCE) and _LEFT_EARLY in _shown_by(
                text
            ):
                row = _LEFT_EARLY  # the error only says that this rank waited
            is_own = row.weight in (Weight.CAUSE, Weight.EXCEPTION) and row is not _INTERRUPT
            if self._verdict and self._verdict.failure in (_HANG, _QUIET) and not is_own:
                return  # Ctrl-C, or the end of a rank, has only ended the hang
        if row is None or (self._verdict and self._verdict.failure is row):
            return
        # The launcher's sentence has the very error of the script.
        line = None if row is _OWN_ERROR else self._rows.get(row.id)
        self._verdict, self.stop = line or _explained(row, number, text), None

    @property
    def explanations(self) -> list[Explanation]:
        """Each row once: the launcher's verdict, causes, symptoms, what the job survived, consequences."""
        places = [(_PLACE[line.failure.weight], line) for line in self._rows.values()]
        survived = _PLACE[Weight.CONSEQUENCE] + (1 if self._verdict else -1)
        places += [(survived + row.failure.weight / 10, row) for row in self._survived.values()]
        if self._verdict:
            places.append((_PLACE_OF_VERDICT[self._verdict.failure.weight], self._verdict))
        first: dict[str, Explanation] = {}
        for _, line in sorted(places, key=lambda place: (place[0], place[1].number)):
            first.setdefault(line.failure.id, line)
        return [*first.values()]

    @property
    def survived(self) -> str:
        """Why the job must have survived every failure in the log, "" if it has not."""
        if self._steps >= _SURVIVED_STEPS:
            return "the job goes on to train after it"
        if any(map(_WELL.search, self._end)):
            return "the log ends well"
        are_exceptions = all(re.match(_OWN_ERROR.pattern, row.line) for row in self._rows.values())
        if are_exceptions and self.last_sentence and not self._verdict:
            return "no sentence of mpiddp says that a rank failed"
        return ""


def _shown_by(line: str, but: Weight | None = None) -> list[Failure]:
    """The rows whose texts the line has, without the rows of one weight.

    The row of a script's own error counts only if no other row does. A text in quotes, maybe a tip, does not count.
    """
    unquoted = _QUOTED.sub(lambda quote: quote[0][0] + quote[0][-1], line)
    shown = [
        row
        for row in ROWS
        if row.weight != but
        and any(text in (line if _QUOTE.search(text) else unquoted) for text in row.says)
        and re.search(row.pattern, line)
    ]
    return [row for row in shown if row.weight != Weight.EXCEPTION] or shown


def _split(line: bytes) -> tuple[str, str]:
    """A launcher's prefix, "" if there is none, and the text of the line."""
    text = line.decode("utf-8", "replace").strip("\0").rstrip()
    prefix = _PREFIX.match(text)
    return (prefix[0], text[prefix.end() :]) if prefix else ("", text)


def _explained(row: Failure, number: int, line: str) -> Explanation:
    """The explanation of a line by a row. A long line is cut to the part with the row's text."""
    at = max(line.find(text) for text in row.says)
    start = max(0, min(at - _SHOWN // 4, len(line) - _SHOWN))
    part = line[start : start + _SHOWN].strip()
    shown = escaped("…" * (start > 0) + part + "…" * (start + _SHOWN < len(line)))
    return Explanation(row, number, shown)
