"""Why a job failed, from its log.

The launcher's own sentence decides. Without one, the last traceback of a rank decides, or else a known text.
A failure is only "also seen" if the job has made steps after it, and forgotten if the job has restarted. One
regular expression finds the lines with a known text, because a log may have millions of lines.
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
_SHOWN = 160  # characters of a line that are printed
_LONGEST_MESSAGE = 12  # lines of an exception's message in which a known text is looked for
_MOST_TRACEBACKS = 200
_SURVIVED_STEPS = 2  # a job that makes so many steps after a failure has survived it
_END_LINES = 50  # in the last lines of a log, a job may say that it has ended well

# Launchers put these before a line of a rank: "[rank1]: ", "[1,0]<stderr>:", "[3] ", "3: ".
_PREFIX = re.compile(r"(\[[^][]{1,60}\](<std\w+>)?:? ?|\d+: |<std\w+>: ?)+")
_RANK = re.compile(r"rank ?(\d+)|\[\d+,(\d+)\]|\[(\d+)\]|(\d+): ")
_COLOURS = re.compile(rb"\x1b\[[0-9;?]*[a-zA-Z]")
_QUOTED = re.compile(r"\"[^\"]*\"|`[^`]*`|(?<!\w)'[^']*'(?!\w)")  # a tip may quote another error
_QUOTE = re.compile("[\"'`]")

_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = ("During handling of", "The above exception was", "Original Traceb")
_FRAME = re.compile(r"\s+File \".*, in (\S+)")
# A child of spawn or forkserver runs the script again in one of these functions.
_RERUNS = ("_fixup_main_from_path", "_fixup_main_from_name")
# The traceback of an uncaught exception begins in one of these functions.
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
# A line that a job prints while it trains.
_STEP = re.compile(rb"(?i)\b(?:step|epoch|iter|iteration|loss)\b\W{0,3}\d|\dit/s")
# A line that a job prints if it has ended well.
_WELL = re.compile(
    rb"(?im)\b(?:training|run|job|fit|everything|all)\b.{0,30}"
    rb"\b(?:complete|completed|finished|done|succeeded|successful|successfully)\b|^\W*done\b"
)

_BY_ID = {row.id: row for row in FAILURES}
# These two rows explain nothing themselves: an error of the script, and a launcher's line about a rank that
# has ended.
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
# Texts with the same first character share a branch, because that is faster than one alternative for each
# text.
_SAYS = [*_CHAINED, *_RERUNS, _TRACEBACK, OURS, *(text for row in _ROWS for text in row.says)]
_BRANCHES = groupby(sorted(_SAYS), key=lambda text: text[0])
_TEXTS = re.compile(
    "|".join(
        f"{re.escape(first)}(?:{'|'.join(re.escape(text[1:]) for text in texts)})"
        for first, texts in _BRANCHES
    ).encode()
)

# Explanations are sorted by these numbers, so a decisive one comes first, and a caught exception comes last.
_DECIDES, _CAUGHT = 0, 4
_PLACE = {Weight.CAUSE: 1, Weight.SYMPTOM: 2, Weight.EXCEPTION: 2, Weight.CONSEQUENCE: 3}


@dataclass(frozen=True)
class Explanation:
    """A known failure in a log, and the first line that shows it."""

    failure: Failure
    number: int  # the number of the line, from 1
    line: str  # the line or its part around the match, safe to print on a terminal

    @property
    def place(self) -> int:
        """Its place in the order, if the launcher's sentence or a traceback shows it."""
        weight = self.failure.weight
        return _DECIDES if weight in (Weight.CAUSE, Weight.EXCEPTION) else _PLACE[weight]


class _Traceback(NamedTuple):
    rank: str  # "" if the line names none
    entry: str  # the function of its first frame
    explanation: Explanation  # explains its exception, or an earlier exception that led to it


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
        self._steps_after = 0  # steps of training since the last line that shows a failure
        self._end = deque[bytes](maxlen=_END_LINES)  # the last lines since that line

    def _begin_attempt(self) -> None:
        self.stop: tuple[int, str] | None = None  # the line about a stop on request
        self.resume = ""  # the command that resumes a stopped job
        self._rows: dict[str, Explanation] = {}  # by id, the first line outside of tracebacks
        # By rank, the first function of the traceback that is being read; "" if it has not come yet.
        self._open: dict[str, str] = {}
        self._chained: set[str] = set()  # ranks whose next exception follows from the last one
        self._last = deque[_Traceback](maxlen=_MOST_TRACEBACKS)
        # The job has caught these exceptions, because it has made steps before its next traceback.
        self._caught = deque[_Traceback](maxlen=_MOST_TRACEBACKS)
        self._has_stepped = False  # since the last traceback
        self._verdict: re.Match[str] | None = None
        self._verdict_at = 0

    def read(self, number: int, line: bytes) -> None:
        """Look at a line with a known text, and at every line while a traceback is open."""
        if (self._open or _TEXTS.search(line)) and self._look_at(number, line):
            self._has_stepped |= self._steps_after > 0
            self._steps_after = 0
            self._end.clear()
            return
        self._end.append(line)
        if self._steps_after < _SURVIVED_STEPS and not self._open:
            self._steps_after += bool(_STEP.search(line))

    def _look_at(self, number: int, line: bytes) -> bool:
        """Keep what a line shows. Returns whether it shows a failure."""
        rank, text = _split(line)
        if text.startswith(OURS):
            self.last_sentence = text
            if text.startswith(f"{OURS}restarting on "):  # the job has survived all before it
                self._begin_attempt()
            elif text.startswith(_STOPPED) and self._verdict is None:  # else the job hung before
                self.stop = number, escaped(text)
            elif text.startswith(_RESUME):
                self.resume = text.removeprefix(_RESUME)
            elif verdict := VERDICT.fullmatch(text):
                self._verdict, self._verdict_at, self.stop = verdict, number, None
            elif self._verdict is not None:
                if _HANG in _shown_by(text):  # the sentence that says where the rank hangs
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
        """Take a line of a rank whose traceback is being read. It may also come from the rank's stdout."""
        entry = self._open[rank]
        if (frame := _FRAME.match(text)) and (not entry or frame[1] in _RERUNS):
            entry = self._open[rank] = frame[1]
        if not entry or not _RAISED.fullmatch(text):
            return text[:1].isspace()
        del self._open[rank]
        error = _explained([*_shown_by(text, Weight.EXCEPTION), _OWN_ERROR][0], number, text)
        has_row = _RERUN.id in self._rows  # for example, because another child has printed its text
        if entry in _RERUNS and (has_row or not re.fullmatch(r"[\w.]+:", text)):
            error = self._rows.setdefault(_RERUN.id, _explained(_RERUN, number, text))
        before = [traceback for traceback in self._last if traceback.rank == rank]
        if rank in self._chained and before:
            _, first_entry, cause = before[-1]
            self._last.remove(before[-1])
            entry = first_entry if first_entry in _ENTRIES else entry
            if cause.failure is not _OWN_ERROR and error.failure.weight > cause.failure.weight:
                error = cause  # the table explains the earlier exception better
        self._chained.discard(rank)
        if self._has_stepped:
            self._caught.extend(self._last)
            self._last.clear()
            self._has_stepped = False
        self._last.append(_Traceback(rank, entry, error))
        return True

    @property
    def explanations(self) -> list[Explanation]:
        """Each row once: the decisive explanation, then causes, symptoms, consequences, caught exceptions."""
        decisive = self._by_verdict() or self._by_traceback()
        places = [(_PLACE[line.failure.weight], line) for line in self._rows.values()]
        places += [(_CAUGHT, error.explanation) for error in (*self._caught, *self._last)]
        if decisive is not None:
            places = [(place, line) for place, line in places if line.number != self._verdict_at]
            places.append((decisive.place, decisive))
        first: dict[str, Explanation] = {}
        for _, line in sorted(places, key=lambda place: (place[0], place[1].number)):
            first.setdefault(line.failure.id, line)
        return [*first.values()]

    @property
    def survived(self) -> str:
        """Why the job must have survived every failure in the log, "" if it has not."""
        if self._steps_after >= _SURVIVED_STEPS:
            return "the job goes on to train after it"
        if any(map(_WELL.search, self._end)):
            return "the log ends well"
        weights = {line.failure.weight for line in self._rows.values()}
        if self._verdict or weights - {Weight.EXCEPTION}:
            return ""
        if self.last_sentence:
            return "no sentence of mpiddp says that a rank failed"
        has_ended = any(error.entry in _ENTRIES for error in (*self._caught, *self._last))
        return "" if has_ended else "the job has caught it, and printed it itself"

    def _by_verdict(self) -> Explanation | None:
        """The explanation of the launcher's last sentence about a failure; None if it names no cause."""
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
        """The explanation of a last traceback of a rank, of several the one nearest to a cause."""
        weights = {line.failure.weight for line in self._rows.values()}
        if self._has_stepped and weights & {Weight.CAUSE, Weight.SYMPTOM}:
            return None  # the job has survived its tracebacks, and failed later
        last = [*self._last]
        if not any(error.rank for error in last):  # one rank may have printed all of them
            last.reverse()
        for group in (last, [*self._caught][::-1]):
            errors = [self._with_message(error.explanation) for error in group]
            first = min(errors, key=lambda error: error.place, default=None)
            if first is not None and first.failure.weight != Weight.CONSEQUENCE:
                return first
        return self._with_message(last[0].explanation) if last else None

    def _with_message(self, error: Explanation) -> Explanation:
        """The explanation by a later line of the message, if no row explains the exception's first line."""
        for line in self._rows.values() if error.failure is _OWN_ERROR else ():
            is_near = 0 < line.number - error.number <= _LONGEST_MESSAGE
            if is_near and line.failure.weight in (Weight.CAUSE, Weight.CONSEQUENCE):
                return line
        return error


def _shown_by(line: str, but: Weight | None = None) -> list[Failure]:
    """The rows whose texts the line has, without the rows of one weight.

    The row of a script's own error counts only if no other row does. A text in quotes does not count, because
    it may be a tip.
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
    """The rank in a launcher's prefix ("" if there is none), and the text of the line."""
    text = line.decode("utf-8", "replace").strip("\0").rstrip()
    prefix = _PREFIX.match(text)
    if prefix is None:
        return "", text
    rank = _RANK.search(prefix[0])
    return next(filter(None, rank.groups()), "") if rank else "", text[prefix.end() :]


def _explained(row: Failure, number: int, line: str) -> Explanation:
    """The explanation of a line by a row. A long line is cut to the part with the row's text."""
    at = max(line.find(text) for text in row.says)
    start = max(0, min(at - _SHOWN // 4, len(line) - _SHOWN))
    part = line[start : start + _SHOWN].strip()
    shown = escaped("…" * (start > 0) + part + "…" * (start + _SHOWN < len(line)))
    return Explanation(row, number, shown)
