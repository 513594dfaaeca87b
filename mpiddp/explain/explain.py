"""Say why a job failed, from its log: `mpiddp explain LOGFILE`.

    mpiddp explain train.log
    mpiddp explain ssh-key-refused                        # a known failure, by its id
    squeue --me; mpiddp explain slurm-4711.out
    mpirun -n 4 python train.py 2>&1 | tee train.log | mpiddp explain -

The launcher's own sentence decides, else the last traceback of a rank, else a known text. What the job has
survived is at most "also seen". One regular expression finds the lines that matter, whatever their bytes are.
"""

from __future__ import annotations

import io
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from mpiddp.arguments import OneSentenceParser
from mpiddp.errors import DONE, FAILED, UserError
from mpiddp.explain.failures import FAILURES, Failure, Weight
from mpiddp.text import escaped

_LONGEST_LINE = 1 << 13  # bytes; what is cut off is searched as a line of its own
_SHOWN = 160  # characters of a line
_LONGEST_MESSAGE = 12  # lines of an exception
_MOST_TRACEBACKS = 200
_GOES_ON_LINES, _GOES_ON_STEPS = 300, 2  # after a failure: the job has survived it
_GOES_ON_AFTER_VERDICT = 10  # lines: nothing but sentences of mpiddp follows the last one of these
_END_LINES = 50  # of a log, in which it may say that it ended well

# What launchers write before a rank's line: "[rank1]: ", "[1,0]<stderr>:", "[3] ", "3: ".
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
# The first function in the traceback of an uncaught exception.
_ENTRIES = ("<module>", "_run_module_as_main", "_bootstrap", "_bootstrap_inner")
_RAISED = re.compile(r"([A-Za-z_]\w*\.)*[A-Za-z_]\w*(: .*|:?)")
_OURS = "mpiddp: "
_VERDICT = re.compile(
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

# How near a line is to the root cause: what decides comes first, and what was caught last.
_DECIDES, _CAUSE, _SYMPTOM, _CONSEQUENCE, _CAUGHT = range(5)
_PLACE = {
    Weight.CAUSE: _CAUSE,
    Weight.SYMPTOM: _SYMPTOM,
    Weight.EXCEPTION: _SYMPTOM,
    Weight.CONSEQUENCE: _CONSEQUENCE,
}


@dataclass(frozen=True)
class Explanation:
    """A known failure in a log, and the first line that shows it."""

    failure: Failure
    number: int  # of the line, from 1
    line: str  # or its part around the match, without effects on a terminal


class Findings(NamedTuple):
    """What a log shows: the root cause first.

    `survived` says how one sees that the job went on after all of it, "" if it did not. `last_sentence` is
    mpiddp's, "" for none.
    """

    found: list[Explanation]
    survived: str
    last_sentence: str


def explain(lines: Iterable[str]) -> Explanation | None:
    """The root cause of a job that has failed, as far as its lines show it; None if nothing is known."""
    text = "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)
    found = explain_file(io.BytesIO(text.encode("utf-8", "backslashreplace"))).found
    return found[0] if found else None


def explain_file(file: BinaryIO) -> Findings:
    """What the bytes of a file or a pipe show, in little memory."""
    log = _Log()
    for number, line in _lines(file):
        log.read(number, line)
    return Findings(_in_order(log), _survived(log), log.last_sentence)


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The lines and their numbers. \\r ends a line too, and has no number of its own."""
    number = 1
    while piece := file.readline(_LONGEST_LINE):
        for line in (_COLOURS.sub(b"", piece) if b"\x1b[" in piece else piece).splitlines():
            yield number, line
        number += piece.endswith(b"\n")


@dataclass(eq=False)
class _Traceback:
    """A traceback of one rank, "" for an unknown one."""

    rank: str
    entry: str = ""  # the function of its first frame, "" before that
    found: Explanation | None = None  # its exception, or what led to it
    was_survived: bool = False  # the job has made a step before the next one


class _Log:
    """One pass through a log. It keeps the lines that matter, and what follows the last one of them."""

    def __init__(self) -> None:
        self.rows: dict[str, Explanation] = {}  # the first line of each row outside of tracebacks
        self.tracebacks: deque[_Traceback] = deque(maxlen=_MOST_TRACEBACKS)
        self.verdict: tuple[int, re.Match[str]] | None = None
        self.last_sentence = ""
        self.has_stepped = False  # since the last traceback
        self.lines_after = self.steps_after = 0  # the last line that matters
        self.end: deque[bytes] = deque(maxlen=_END_LINES)
        self._open: dict[str, _Traceback] = {}  # by rank
        self._led: dict[str, _Traceback] = {}  # a traceback that another one of its rank follows
        self._last = 0

    def read(self, number: int, line: bytes) -> None:
        """Look at a line with a known text, and at all lines while a traceback is open."""
        if (self._open or _TEXTS.search(line)) and self._look_at(number, line):
            self.has_stepped |= self.steps_after > 0
            self._last, self.steps_after = number, 0
            self.end.clear()
        else:
            self.end.append(line)
            if self.steps_after < _GOES_ON_STEPS and not self._open:
                self.steps_after += bool(_STEP.search(line))
        self.lines_after = number - self._last

    def _look_at(self, number: int, line: bytes) -> bool:
        """Keep what matters of a line. Returns whether it shows that something failed."""
        rank, text = _split(line)
        if text.startswith(_OURS):
            self.last_sentence = text
            if verdict := _VERDICT.fullmatch(text):
                self.verdict = number, verdict
            elif self.verdict is not None:
                return True
        if text.startswith(_CHAINED):
            self._led |= {each.rank: each for each in self.tracebacks if each.rank == rank}
        if _TRACEBACK in text:
            self._open[rank] = _Traceback(rank)
            return True
        if rank in self._open:
            return self._continue(self._open[rank], number, text)
        found = _shown_by(text)
        for row in found:
            self.rows.setdefault(row.id, Explanation(row, number, _shown(text, row)))
        return bool(found)

    def _continue(self, traceback: _Traceback, number: int, text: str) -> bool:
        """Take a line of a traceback's rank. A line of its stdout may stand between."""
        if frame := _FRAME.match(text):
            traceback.entry = traceback.entry or frame[1]
        if not traceback.entry or not _RAISED.fullmatch(text):
            return text[:1].isspace()
        del self._open[traceback.rank]
        row = next(iter(_shown_by(text, Weight.EXCEPTION)), _EXCEPTION)
        traceback.found = Explanation(row, number, _shown(text, row))
        led = self._led.pop(traceback.rank, None)
        if led is not None and led in self.tracebacks and not led.was_survived:
            self.tracebacks.remove(led)
            if led.entry in _ENTRIES:
                traceback.entry = led.entry
            if row is _EXCEPTION and led.found and led.found.failure is not _EXCEPTION:
                traceback.found = led.found  # the table knows what has led to it
        if self.has_stepped:
            for each in self.tracebacks:
                each.was_survived = True
            self.has_stepped = False
        self.tracebacks.append(traceback)
        return True


def _in_order(log: _Log) -> list[Explanation]:
    """What decides, other causes, symptoms, consequences, what was caught: each row once."""
    decisive = _by_verdict(log) or _by_traceback(log)
    places = [(_PLACE[each.failure.weight], each) for each in log.rows.values()]
    places += [(_CAUGHT, each.found) for each in log.tracebacks if each.found]
    if decisive is not None:
        number = log.verdict[0] if log.verdict else 0
        places = [each for each in places if each[1].number != number]
        places.append((_place(decisive.failure), decisive))
    elif all(each.failure.weight == Weight.EXCEPTION for _, each in places):
        places = []  # nothing says that the job failed; a script may print exceptions that it handles
    found: dict[str, Explanation] = {}
    for _, each in sorted(places, key=lambda place: (place[0], place[1].number)):
        found.setdefault(each.failure.id, each)
    return [*found.values()]


def _survived(log: _Log) -> str:
    """How one sees that the job went on after all that the log shows, "" if it did not."""
    is_long = log.lines_after >= _GOES_ON_LINES or log.steps_after >= _GOES_ON_STEPS
    if is_long or (log.verdict and log.lines_after >= _GOES_ON_AFTER_VERDICT):
        return f"the log goes on for {log.lines_after} lines after it"
    if any(map(_WELL.search, log.end)):
        return "the log ends well"
    if log.verdict or any(each.failure.weight != Weight.EXCEPTION for each in log.rows.values()):
        return ""
    if log.last_sentence:
        return "no sentence of mpiddp says that a rank failed"
    has_ended = any(each.entry in _ENTRIES for each in log.tracebacks)
    return "" if has_ended else "the job has caught it and printed it itself"


def _by_verdict(log: _Log) -> Explanation | None:
    """What the launcher's last sentence about a failure says, where it says why."""
    if log.verdict is None:
        return None
    number, verdict = log.verdict
    last = [each for each in log.tracebacks if not each.was_survived]
    own = [each.found for each in last if each.rank == verdict["rank"]]
    if verdict["error"] is not None and own:
        return own[-1]
    said = verdict["error"] or verdict["words"]
    rows = _shown_by(said or verdict[0], Weight.EXCEPTION)
    if said and not rows:
        rows = [_EXCEPTION if verdict["error"] else _EXIT]
    for row in rows:
        if row.weight != Weight.CONSEQUENCE:
            return log.rows.get(row.id) or Explanation(row, number, _shown(verdict[0], row))
    return None


def _by_traceback(log: _Log) -> Explanation | None:
    """The last traceback of the rank that failed: of several, the nearest to a cause."""
    weights = {each.failure.weight for each in log.rows.values()}
    if log.has_stepped and weights & {Weight.CAUSE, Weight.SYMPTOM}:
        return None  # the job has survived them, and failed later
    last = [each for each in log.tracebacks if not each.was_survived]
    if not any(each.rank for each in last):  # the last one may be of the same rank as the others
        last.reverse()
    caught = [each for each in log.tracebacks if each.was_survived]
    for group in (last, caught[::-1]):
        found = [_with_message(log, each.found) for each in group if each.found]
        first = min(found, key=lambda each: _place(each.failure), default=None)
        if first is not None and _place(first.failure) != _CONSEQUENCE:
            return first
    return last[0].found if last else None


def _with_message(log: _Log, found: Explanation) -> Explanation:
    """The row that a later line of an exception's message shows, where its first line shows none."""
    if found.failure is _EXCEPTION:
        for row in log.rows.values():
            is_near = 0 < row.number - found.number <= _LONGEST_MESSAGE
            if is_near and row.failure.weight == Weight.CAUSE:
                return row
    return found


def _place(row: Failure) -> int:
    """Of a row that a verdict or an exception shows."""
    return _DECIDES if row.weight in (Weight.CAUSE, Weight.EXCEPTION) else _PLACE[row.weight]


def _shown_by(line: str, but: Weight | None = None) -> list[Failure]:
    """The rows that the line shows, without those of one weight.

    An exception that another row knows is that row's alone. What stands in quotes has not happened here.
    """
    said = _QUOTED.sub(lambda found: found[0][0] + found[0][-1], line)
    shown = [
        failure
        for failure in FAILURES
        if failure.weight != but
        and any(text in (line if _QUOTE.search(text) else said) for text in failure.says)
        and (not failure.pattern or re.search(failure.pattern, line))
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


_EXCEPTION, _EXIT = (
    next(row for row in FAILURES if row.id == name) for name in ("python-exception", "python-exit")
)
_SAYS = [text for failure in FAILURES for text in failure.says]
_TEXTS = re.compile(_any_of([text.encode() for text in (*_SAYS, *_CHAINED, _TRACEBACK, _OURS)]))


def main(argv: list[str]) -> int:
    """Run `mpiddp explain ARGV`. Returns 0 if a failure is explained, 1 if not. Raises UserError."""
    parser = OneSentenceParser(
        prog="mpiddp explain",
        description="Say why a job failed, from its log: the root cause, what fixes it, and what else is in "
        "it. For logs of mpiddp, mpirun, torchrun and Slurm. The id of a known failure is explained too.",
        epilog="Exit codes: 0 explained, 1 nothing failed or nothing known in it, 2 no such log.",
        allow_abbrev=False,
    )
    parser.add_argument("log", metavar="LOGFILE", help="a file, - for stdin, or an id")
    name: str = parser.parse_args(argv).log
    row = next((row for row in FAILURES if row.id == name), None)
    if row is not None and not Path(name).exists():
        print(f"{row.id}: {row.cause}\nFix:  {row.fix}")
        return DONE
    try:
        # open(), as a Path would change //server/log
        with sys.stdin.buffer if name == "-" else open(name, "rb") as file:  # noqa: PTH123
            is_empty = not file.peek(1)  # type: ignore[union-attr]
            findings = explain_file(file)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{escaped(name)} cannot be read ({reason}).") from None
    if findings.found and not findings.survived:
        print(_report(name, findings.found))
        return DONE
    print(f"{escaped(name)} is empty." if is_empty else f"{escaped(name)}: {_nothing(findings)}")
    return FAILED


def _nothing(findings: Findings) -> str:
    if findings.found:
        first = findings.found[0]
        return (
            f'nothing failed for good. Line {first.number} says "{first.line}", but {findings.survived}. '
            f"More: mpiddp explain {first.failure.id}"
        )
    last = findings.last_sentence
    said = f"mpiddp's last sentence is: {escaped(last.removeprefix(_OURS))} " if last else ""
    return (
        f"no known failure in it. {said}To ask somebody, send the command and the first error with 20 lines "
        "around it. NCCL_DEBUG=WARN and TORCH_DISTRIBUTED_DEBUG=DETAIL add facts."
    )


def _report(name: str, found: list[Explanation]) -> str:
    first, *others = found
    failure = first.failure
    lines = [
        f"{escaped(name)}:{first.number}: {first.line}",
        f"{failure.id}: {failure.cause}",
        f"Fix:  {failure.fix}",
    ]
    if others:
        lines += ["", "Also seen:"]
        lines += [
            f"  line {other.number}: {other.failure.id} ({other.line[:60]})" for other in others
        ]
    return "\n".join(lines)
