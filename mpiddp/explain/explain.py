"""Why a job failed, from its log.

The launcher's own sentence decides, else the last traceback of a rank, else a known text. A failure that the
job has survived is at most "also seen"; after a restart it is forgotten. One regular expression finds the
lines that matter.
"""

from __future__ import annotations

import io
import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import BinaryIO, NamedTuple

from mpiddp.explain.failures import FAILURES, Failure, Weight
from mpiddp.text import escaped

_LONGEST_LINE = 1 << 13  # bytes; the rest is searched as a line of its own
_SHOWN = 160  # characters of a line
_LONGEST_MESSAGE = 12  # lines of an exception
_MOST_TRACEBACKS = 200
_GOES_ON_LINES, _GOES_ON_STEPS = 300, 2  # after a failure: the job has survived it
_END_LINES = 50  # of a log, in which it may say that it ended well

# The prefixes of launchers before a rank's line: "[rank1]: ", "[1,0]<stderr>:", "[3] ", "3: ".
_PREFIX = re.compile(r"(\[[^][]{1,60}\](<std\w+>)?:? ?|\d+: |<std\w+>: ?)+")
_RANK = re.compile(r"rank ?(\d+)|\[\d+,(\d+)\]|\[(\d+)\]|(\d+): ")
_COLOURS = re.compile(rb"\x1b\[[0-9;?]*[a-zA-Z]")
_QUOTED = re.compile(r"\"[^\"]*\"|`[^`]*`|(?<!\w)'[^']*'(?!\w)")  # a tip names what did not happen
_QUOTE = re.compile("[\"'`]")

_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = (
    "During handling of the above exc",
    "The above exception was the dir",
    "Original Traceb",
)
_FRAME = re.compile(r"\s+File \".*, in (\S+)")
_RERUNS = ("_fixup_main_from_path", "_fixup_main_from_name")  # in a child of spawn or forkserver
# The first function in the traceback of an uncaught exception, or one of these two.
_ENTRIES = ("<module>", "_run_module_as_main", "_bootstrap", "_bootstrap_inner", *_RERUNS)
_RAISED = re.compile(r"([A-Za-z_]\w*\.)*[A-Za-z_]\w*(: .*|:?)")
OURS = "mpiddp: "
_STOPPED = (f"{OURS}stopped on request", f"{OURS}interrupted")
_RESUME = f"{OURS}to resume: "
VERDICT = re.compile(
    r"mpiddp: (?:.* Then )?(?:(?:rank (?P<rank>\d+) on \S+ )?"
    r"(?:failed first: (?P<error>.*?)|ended first, (?:with exit code \d+(?:: (?P<words>.*?))?|without.*)"
    r"|was killed by .*)|the job (?:failed|hung).*|(?:no rank|rank \d+ on \S+) has made .*|lost \S+ \(.*)"
    r"(?: \(its traceback: [^)]*\))?\.?(?: The other ranks were stopped\.)?"
)
# A line of a job that trains, and one of a job that has ended well.
_STEP = re.compile(rb"(?i)\b(?:step|epoch|iter|iteration|loss)\b\W{0,3}\d|\dit/s")
_WELL = re.compile(
    rb"(?im)\b(?:training|run|job|fit|everything|all)\b.{0,30}"
    rb"\b(?:complete|completed|finished|done|succeeded|successful|successfully)\b|^\W*done\b"
)

_BY_ID = {row.id: row for row in FAILURES}
# These two lead to the root cause, and explain nothing: a script's own error, and a launcher's line about a
# rank that has ended.
_OWN_ERROR = Failure(
    id="own-error",
    says=("Error: ", "Exception:"),
    cause="",
    fix="",
    pattern=r"^([a-zA-Z_]\w*\.)*[A-Z]\w*(Error|Exception): ",
    weight=Weight.EXCEPTION,
)
_RANK_ENDED = Failure(
    id="rank-ended",
    says=(
        "one or more processes exited with non-zero status",
        "BAD TERMINATION OF ONE OF YOUR APPLICATION",
        "multiprocessing.errors.ChildFailedError",
        "MPI_ABORT was invoked on rank",
        "called MPI_Abort",
        "Exited with exit code",
        "CANCELLED AT",
        "The other ranks were stopped",
    ),
    cause="",
    fix="",
    pattern=r"exited with non|BAD TERM|ChildF|MPI_A|srun: error: .*Exited|"
    r"\*\*\* (JOB|STEP).*CANCEL|^mpiddp: ",
    weight=Weight.CONSEQUENCE,
)
_ROWS = (*FAILURES, _OWN_ERROR, _RANK_ENDED)
_RERUN, _HANG = _BY_ID["python-start-method"], _BY_ID["python-hang"]
# Texts with the same first character share a branch: faster than one alternative a text.
_SAYS = [text for row in _ROWS for text in row.says]
_BRANCHES = groupby(
    sorted([*_SAYS, *_CHAINED, *_RERUNS, _TRACEBACK, OURS]), key=lambda text: text[0]
)
_TEXTS = re.compile(
    "|".join(
        f"{re.escape(first)}(?:{'|'.join(re.escape(text[1:]) for text in texts)})"
        for first, texts in _BRANCHES
    ).encode()
)

# The order of explanations: the decisive one comes first, and an exception that was caught comes last.
_DECIDES, _CAUGHT = 0, 4
_PLACE = {Weight.CAUSE: 1, Weight.SYMPTOM: 2, Weight.EXCEPTION: 2, Weight.CONSEQUENCE: 3}


@dataclass(frozen=True)
class Explanation:
    """A known failure in a log, and the first line that shows it."""

    failure: Failure
    number: int  # of the line, from 1
    line: str  # the line, or its part around the match, without effects on a terminal

    @property
    def place(self) -> int:
        """Its place in the order if the verdict or an exception shows it."""
        weight = self.failure.weight
        return _DECIDES if weight in (Weight.CAUSE, Weight.EXCEPTION) else _PLACE[weight]


class _Traceback(NamedTuple):
    rank: str  # "" for an unknown one
    entry: str  # the function of its first frame
    explanation: Explanation  # of its exception, or of an earlier exception that led to it


def explain(lines: Iterable[str]) -> Explanation | None:
    """The root cause of a job that has failed, as far as its lines show it; None if nothing is known."""
    text = "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)
    log = explain_file(io.BytesIO(text.encode("utf-8", "backslashreplace")))
    return next(iter(log.explanations), None)


def explain_file(file: BinaryIO) -> Log:
    """Read a log from a file or a pipe, in little memory."""
    log, number = Log(), 1
    while piece := file.readline(_LONGEST_LINE):
        # The \r of a progress bar ends a line too, which has no number of its own.
        for line in (_COLOURS.sub(b"", piece) if b"\x1b[" in piece else piece).splitlines():
            log.read(number, line)
        number += piece.endswith(b"\n")
    return log


class Log:
    """One pass through a log. It keeps the lines that matter, and counts the lines behind them."""

    def __init__(self) -> None:
        self.last_sentence = ""  # of mpiddp, "" for none
        self._begin_attempt()
        self._last_at = 0  # the number of the last line that matters
        self._lines_after = self._steps_after = 0  # lines, and steps of training, behind that line
        self._end = deque[bytes](maxlen=_END_LINES)

    def _begin_attempt(self) -> None:
        self.stop: tuple[int, str] | None = None  # the line of a stop on request
        self.resume = ""  # the command that resumes it
        self._rows: dict[str, Explanation] = {}  # the first line of each row outside of tracebacks
        # By rank, the first function of the traceback that is being read; "" if it has not come yet.
        self._open: dict[str, str] = {}
        self._chained: set[str] = set()  # ranks whose next traceback follows from the one before
        self._last = deque[_Traceback](maxlen=_MOST_TRACEBACKS)
        # Tracebacks of exceptions that the job has caught, because steps were made before the next one.
        self._caught = deque[_Traceback](maxlen=_MOST_TRACEBACKS)
        self._has_stepped = False  # since the last traceback
        self._verdict: re.Match[str] | None = None
        self._verdict_at = 0

    def read(self, number: int, line: bytes) -> None:
        """Look at a line with a known text, and at all lines while a traceback is open."""
        if (self._open or _TEXTS.search(line)) and self._look_at(number, line):
            self._has_stepped |= self._steps_after > 0
            self._last_at, self._steps_after = number, 0
            self._end.clear()
        else:
            self._end.append(line)
            if self._steps_after < _GOES_ON_STEPS and not self._open:
                self._steps_after += bool(_STEP.search(line))
        self._lines_after = number - self._last_at

    def _look_at(self, number: int, line: bytes) -> bool:
        """Keep the facts of a line. Returns whether it shows that something failed."""
        rank, text = _split(line)
        if text.startswith(OURS):
            self.last_sentence = text
            if text.startswith(f"{OURS}restarting on "):  # the job has survived all before it
                self._begin_attempt()
            elif text.startswith(_STOPPED) and self._verdict is None:  # else it hung before
                self.stop = number, escaped(text)
            elif text.startswith(_RESUME):
                self.resume = text.removeprefix(_RESUME)
            elif verdict := VERDICT.fullmatch(text):
                self._verdict, self._verdict_at, self.stop = verdict, number, None
            elif self._verdict is not None:
                if _HANG in _shown_by(text):  # this sentence names the rank, and its line
                    self._rows.setdefault(_HANG.id, _explained(_HANG, number, text))
                return True
        if text.startswith(_CHAINED):
            self._chained.add(rank)
        frame = _FRAME.match(text)
        is_rerun = frame is not None and frame[1] in _RERUNS
        # The beginning of a rerun's traceback may be missing in the log.
        if _TRACEBACK in text or (is_rerun and rank not in self._open):
            self._open[rank] = frame[1] if frame else ""
            return True
        if rank in self._open:
            return self._continue(rank, number, text)
        rows = _shown_by(text)
        for row in rows:
            self._rows.setdefault(row.id, _explained(row, number, text))
        return bool(rows)

    def _continue(self, rank: str, number: int, text: str) -> bool:
        """Take a line of a rank whose traceback is being read. It may be a line of the rank's stdout."""
        entry = self._open[rank]
        if (frame := _FRAME.match(text)) and (not entry or frame[1] in _RERUNS):
            entry = self._open[rank] = frame[1]
        if not entry or not _RAISED.fullmatch(text):
            return text[:1].isspace()
        del self._open[rank]
        error = _explained([*_shown_by(text, Weight.EXCEPTION), _OWN_ERROR][0], number, text)
        has_row = _RERUN.id in self._rows  # for example, by a text that another child has printed
        if entry in _RERUNS and (has_row or not re.fullmatch(r"[\w.]+:", text)):
            error = self._rows.setdefault(_RERUN.id, _explained(_RERUN, number, text))
        before = [traceback for traceback in self._last if traceback.rank == rank]
        if rank in self._chained and before:
            _, first_entry, cause = before[-1]
            self._last.remove(before[-1])
            entry = first_entry if first_entry in _ENTRIES else entry
            is_weaker = error.failure.weight > cause.failure.weight
            if cause.failure is not _OWN_ERROR and (is_weaker or error.failure is _OWN_ERROR):
                error = cause  # the table explains it better
        self._chained.discard(rank)
        if self._has_stepped:
            self._caught.extend(self._last)
            self._last.clear()
            self._has_stepped = False
        self._last.append(_Traceback(rank, entry, error))
        return True

    @property
    def explanations(self) -> list[Explanation]:
        """The decisive one, other causes, symptoms, consequences, caught exceptions: each row once."""
        decisive = self._by_verdict() or self._by_traceback()
        places = [(_PLACE[line.failure.weight], line) for line in self._rows.values()]
        places += [(_CAUGHT, error.explanation) for error in (*self._caught, *self._last)]
        if decisive is not None:
            places = [(place, line) for place, line in places if line.number != self._verdict_at]
            places.append((decisive.place, decisive))
        elif all(line.failure.weight == Weight.EXCEPTION for _, line in places):
            places = []  # nothing says that the job failed; a script may print exceptions that it handles
        first: dict[str, Explanation] = {}
        for _, line in sorted(places, key=lambda place: (place[0], place[1].number)):
            first.setdefault(line.failure.id, line)
        return [*first.values()]

    @property
    def survived(self) -> str:
        """Why the job must have gone on after every failure in the log, "" if it has not."""
        if self._lines_after >= _GOES_ON_LINES or self._steps_after >= _GOES_ON_STEPS:
            return f"the log goes on for {self._lines_after} lines after it"
        if any(map(_WELL.search, self._end)):
            return "the log ends well"
        weights = {line.failure.weight for line in self._rows.values()}
        if self._verdict or weights - {Weight.EXCEPTION}:
            return ""
        if self.last_sentence:
            return "no sentence of mpiddp says that a rank failed"
        has_ended = any(error.entry in _ENTRIES for error in (*self._caught, *self._last))
        return "" if has_ended else "the job has caught it and printed it itself"

    def _by_verdict(self) -> Explanation | None:
        """The cause that the launcher's last sentence about a failure names, None if it names none."""
        if (verdict := self._verdict) is None:
            return None
        errors = [error.explanation for error in self._last if error.rank == verdict["rank"]]
        if verdict["error"] is not None and errors:
            return errors[-1]
        message = verdict["error"] or verdict["words"]
        rows = _shown_by(message or verdict[0], Weight.EXCEPTION)
        if message and not rows:
            rows = [_OWN_ERROR]
        for row in rows:
            if row.weight != Weight.CONSEQUENCE:
                return self._rows.get(row.id) or _explained(row, self._verdict_at, verdict[0])
        return None

    def _by_traceback(self) -> Explanation | None:
        """The last traceback of the rank that failed: of several, the nearest to a cause."""
        weights = {line.failure.weight for line in self._rows.values()}
        if self._has_stepped and weights & {Weight.CAUSE, Weight.SYMPTOM}:
            return None  # the job has survived them, and failed later
        last = [*self._last]
        if not any(error.rank for error in last):  # all of them may be of one rank
            last.reverse()
        for group in (last, [*self._caught][::-1]):
            errors = [self._with_message(error.explanation) for error in group]
            first = min(errors, key=lambda error: error.place, default=None)
            if first is not None and first.failure.weight != Weight.CONSEQUENCE:
                return first
        return self._with_message(last[0].explanation) if last else None

    def _with_message(self, error: Explanation) -> Explanation:
        """The explanation by a later line of an exception's message, if its first line explains nothing."""
        for line in self._rows.values() if error.failure is _OWN_ERROR else ():
            is_near = 0 < line.number - error.number <= _LONGEST_MESSAGE
            if is_near and line.failure.weight in (Weight.CAUSE, Weight.CONSEQUENCE):
                return line
        return error


def _shown_by(line: str, but: Weight | None = None) -> list[Failure]:
    """The rows that the line shows, without the rows of one weight.

    An exception counts as a script's own error only if no other row explains it. A text in quotes is a tip,
    which has not happened here.
    """
    unquoted = _QUOTED.sub(lambda quote: quote[0][0] + quote[0][-1], line)
    shown = [
        row
        for row in _ROWS
        if row.weight != but
        and any(text in (line if _QUOTE.search(text) else unquoted) for text in row.says)
        and re.search(row.pattern, line)
    ]
    return [row for row in shown if row.weight != Weight.EXCEPTION] or shown


def _split(line: bytes) -> tuple[str, str]:
    """The rank in a launcher's prefix, "" without one, and the text of the line."""
    text = line.decode("utf-8", "replace").strip("\0").rstrip()
    prefix = _PREFIX.match(text)
    if prefix is None:
        return "", text
    rank = _RANK.search(prefix[0])
    return next(filter(None, rank.groups()), "") if rank else "", text[prefix.end() :]


def _explained(row: Failure, number: int, line: str) -> Explanation:
    """The explanation of a line by a row, with the part of the line that has the row's text."""
    at = max(line.find(text) for text in row.says)
    start = max(0, min(at - _SHOWN // 4, len(line) - _SHOWN))
    part = line[start : start + _SHOWN].strip()
    shown = escaped("…" * (start > 0) + part + "…" * (start + _SHOWN < len(line)))
    return Explanation(row, number, shown)
