"""Say why a job failed, from its log: `mpiddp explain LOGFILE`.

    mpiddp explain train.log
    mpiddp explain ssh-key-refused                        # a known failure, by its id
    squeue --me; mpiddp explain slurm-4711.out
    mpirun -n 4 python train.py 2>&1 | tee train.log | mpiddp explain -

The launcher's own sentence decides, else the last traceback of a rank, else a known text. What the job has
survived is at most "also seen". One regular expression finds the lines that matter, whatever their bytes are.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

from mpiddp.arguments import OneSentenceParser
from mpiddp.errors import DONE, FAILED, UserError
from mpiddp.explain.failures import FAILURES, Failure, Weight
from mpiddp.text import escaped

_BLOCK_BYTES = 1 << 20
_LONGEST_LINE = 1 << 16  # bytes; what is cut off is searched as a line of its own
_AROUND = 500  # bytes of a line on each side of a text that a pattern sees
_SHOWN = 160  # characters of a line
_LONGEST_MESSAGE = 12  # lines of an exception
_MOST_TRACEBACKS = 200
_GOES_ON_LINES, _GOES_ON_STEPS = 300, 2  # after a failure: the job has survived it
_GOES_ON_AFTER_VERDICT = 10  # lines: nothing but sentences of mpiddp follows the last one of these
_END_BYTES = 4096  # of a log, in which it may say that it ended well

# What launchers write before a rank's line: "[rank1]: ", "[1,0]<stderr>:", "[3] ", "3: ".
_PREFIX = re.compile(r"(\[[^][]{1,60}\](<std\w+>)?:? ?|\d+: |<std\w+>: ?)+")
_RANK = re.compile(r"rank ?(\d+)|\[\d+,(\d+)\]|\[(\d+)\]|(\d+): ")
_COLOURS = re.compile(rb"\x1b\[[0-9;?]*[a-zA-Z]")
_QUOTED = re.compile(r"\"[^\"]*\"|`[^`]*`|(?<!\w)'[^']*'(?!\w)")  # a tip names what did not happen

_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = (
    "During handling of the above exc",
    "The above exception was the dir",
    "Original Traceb",
)
_FRAME = re.compile(r"\s+File \".*, in (\S+)")
_ENTRIES = (
    "<module>",
    "_run_module_as_main",
    "_bootstrap",
    "_bootstrap_inner",
)  # of an uncaught exception
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
    """A known failure in a log, and the first line that shows it.

    Attributes:
        failure: the row of the table, with cause and fix.
        number: the line's number, from 1.
        line: the line, or its part around the match, without effects on a terminal.
    """

    failure: Failure
    number: int
    line: str


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
    found = _findings([text.encode("utf-8", "backslashreplace")]).found
    return found[0] if found else None


def explain_file(file: BinaryIO) -> Findings:
    """What the bytes of a file or a pipe show, in little memory."""
    return _findings(
        block + file.readline(_LONGEST_LINE) for block in iter(lambda: file.read(_BLOCK_BYTES), b"")
    )


def _findings(blocks: Iterable[bytes]) -> Findings:
    scan = _Scan()
    for block in blocks:
        scan.read(_COLOURS.sub(b"", block) if b"\x1b[" in block else block)
    return scan.findings()


@dataclass(eq=False)
class _Traceback:
    """A traceback of one rank, "" for an unknown one. `row` is of its exception, or of one that led to it."""

    rank: str
    entry: str = ""  # the function of its first frame
    number: int = 0
    raised: str = ""  # the line of the exception
    row: Failure | None = None

    @property
    def found(self) -> Explanation:
        assert self.row is not None
        return Explanation(self.row, self.number, _shown(self.raised, self.row))


class _Scan:
    """One pass through a log. It keeps the lines that matter, and what follows the last one of them."""

    def __init__(self) -> None:
        self._rows: dict[str, Explanation] = {}  # the first line of each row outside of tracebacks
        self._tracebacks: list[_Traceback] = []  # since the job made a step
        self._caught: deque[_Traceback] = deque(maxlen=_MOST_TRACEBACKS)  # before
        self._open: dict[str, _Traceback] = {}  # by rank
        self._led: dict[str, _Traceback] = {}  # a traceback that another one of its rank follows
        self._verdict: tuple[int, re.Match[str]] | None = None
        self._last_sentence = ""
        self._number = 1
        self._has_stepped = False  # since the last traceback
        self._lines_after = self._steps_after = 0  # the last line that matters
        self._end = b""

    def read(self, block: bytes) -> None:
        """Look at each line with a known text, and at all lines while a traceback is open."""
        at = 0
        while at < len(block):
            if self._open:
                start, end = at, _end_of_line(block, at)
                line = block[start : min(end, start + _LONGEST_LINE)]
            elif match := _TEXTS.search(block, at):
                start = match.start()
                line, end = _line(block, *match.span())
            else:
                break
            self._pass_over(block[at:start])
            if self._look_at(line):
                self._has_stepped |= self._steps_after > 0
                self._lines_after = self._steps_after = 0
                self._end = b""
                self._number += block.count(b"\n", start, end)
            else:
                self._pass_over(block[start:end])
            at = end
        self._pass_over(block[at:])

    def findings(self) -> Findings:
        """The order: what decides, other causes, symptoms, consequences, what was caught."""
        decisive = self._by_verdict() or self._by_traceback()
        places = [(_PLACE[each.failure.weight], each) for each in self._rows.values()]
        places += [(_CAUGHT, each.found) for each in (*self._caught, *self._tracebacks)]
        if decisive is not None:
            number = self._verdict[0] if self._verdict else 0
            places = [each for each in places if each[1].number != number]
            places.append((_place(decisive.failure), decisive))
        elif all(each.failure.weight == Weight.EXCEPTION for _, each in places):
            places = []  # nothing says that the job failed; a script may print exceptions that it handles
        found: dict[str, Explanation] = {}
        for _, each in sorted(places, key=lambda place: (place[0], place[1].number)):
            found.setdefault(each.failure.id, each)
        return Findings([*found.values()], self._survived(), self._last_sentence)

    def _survived(self) -> str:
        is_long = self._lines_after >= _GOES_ON_LINES or self._steps_after >= _GOES_ON_STEPS
        if is_long or (self._verdict and self._lines_after >= _GOES_ON_AFTER_VERDICT):
            return f"the log goes on for {self._lines_after} lines after it"
        if _WELL.search(self._end):
            return "the log ends well"
        signs = [each for each in self._rows.values() if each.failure.weight != Weight.EXCEPTION]
        if self._verdict or signs:
            return ""
        if self._last_sentence:
            return "no sentence of mpiddp says that a rank failed"
        has_ended = any(each.entry in _ENTRIES for each in (*self._caught, *self._tracebacks))
        return "" if has_ended else "the job has caught it and printed it itself"

    def _by_verdict(self) -> Explanation | None:
        """What the launcher's last sentence about a failure says, where it says why."""
        if self._verdict is None:
            return None
        number, verdict = self._verdict
        own = [each for each in self._tracebacks if each.rank == verdict["rank"]]
        if verdict["error"] is not None and own:
            return own[-1].found
        said = verdict["error"] or verdict["words"]
        rows = _shown_by(said or verdict[0], Weight.EXCEPTION)
        if said and not rows:
            rows = [_EXCEPTION if verdict["error"] else _EXIT]
        for row in rows:
            if row.weight != Weight.CONSEQUENCE:
                return self._rows.get(row.id) or Explanation(row, number, _shown(verdict[0], row))
        return None

    def _by_traceback(self) -> Explanation | None:
        """The last traceback of the rank that failed: of several, the nearest to a cause."""
        weights = {each.failure.weight for each in self._rows.values()}
        if self._has_stepped and weights & {Weight.CAUSE, Weight.SYMPTOM}:
            return None  # the job has survived them, and failed later
        last = self._tracebacks
        if not any(
            each.rank for each in last
        ):  # the last one may be of the same rank as the others
            last = last[::-1]
        for group in (last, [*self._caught][::-1]):
            found = sorted(
                (self._with_message(each.found) for each in group),
                key=lambda each: _place(each.failure),
            )
            if found and _place(found[0].failure) != _CONSEQUENCE:
                return found[0]
        return last[0].found if last else None

    def _with_message(self, found: Explanation) -> Explanation:
        """The row that a later line of an exception's message shows, where its first line shows none."""
        if found.failure is _EXCEPTION:
            for row in self._rows.values():
                is_near = 0 < row.number - found.number <= _LONGEST_MESSAGE
                if is_near and row.failure.weight == Weight.CAUSE:
                    return row
        return found

    def _pass_over(self, text: bytes) -> None:
        lines = text.count(b"\n")
        self._number += lines
        self._lines_after += lines
        if self._steps_after < _GOES_ON_STEPS and not self._open:
            self._steps_after += len(list(islice(_STEP.finditer(text), _GOES_ON_STEPS)))
        self._end = (self._end + text[-_END_BYTES:])[-_END_BYTES:]

    def _look_at(self, line: bytes) -> bool:
        """Keep what matters of a line. Returns whether it shows that something failed."""
        rank, text = _split(line)
        if text.startswith(_OURS):
            self._last_sentence = text
            if verdict := _VERDICT.fullmatch(text):
                self._verdict = self._number, verdict
            elif self._verdict is not None:
                return True
        if text.startswith(_CHAINED):
            self._led |= {each.rank: each for each in self._tracebacks if each.rank == rank}
        if _TRACEBACK in text:
            self._open[rank] = _Traceback(rank)
            return True
        if rank in self._open:
            return self._continue(self._open[rank], text)
        found = _shown_by(text)
        for row in found:
            self._rows.setdefault(row.id, Explanation(row, self._number, _shown(text, row)))
        return bool(found)

    def _continue(self, traceback: _Traceback, text: str) -> bool:
        """Take a line of a traceback's rank. A line of its stdout may stand between."""
        if frame := _FRAME.match(text):
            traceback.entry = traceback.entry or frame[1]
        if not traceback.entry or not _RAISED.fullmatch(text):
            return text[:1].isspace()
        del self._open[traceback.rank]
        traceback.number, traceback.raised = self._number, text
        own = _shown_by(text, Weight.EXCEPTION)
        traceback.row = own[0] if own else _EXCEPTION
        led = self._led.pop(traceback.rank, None)
        if led in self._tracebacks:
            self._tracebacks.remove(led)
            if led.entry in _ENTRIES:
                traceback.entry = led.entry
            if not own and led.row is not _EXCEPTION:  # the table knows what has led to it
                traceback.number, traceback.raised = led.number, led.raised
                traceback.row = led.row
        if self._has_stepped:
            self._caught += self._tracebacks
            self._tracebacks, self._has_stepped = [], False
        self._tracebacks = [*self._tracebacks[-_MOST_TRACEBACKS:], traceback]
        return True


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


def _end_of_line(block: bytes, at: int) -> int:
    found = _LINE_END.search(block, at)
    return found.end() if found else len(block)


def _line(block: bytes, start: int, end: int) -> tuple[bytes, int]:
    """The line around a match, at most _AROUND bytes on each side, and where to go on. \\r ends lines too."""
    before = block[max(0, start - _AROUND) : start]
    after = block[end : end + _AROUND]
    before = before[max(before.rfind(b"\n"), before.rfind(b"\r")) + 1 :]
    after = _LINE_END.split(after, maxsplit=1)[0]
    return before + block[start:end] + after, end + len(after)


def _split(line: bytes) -> tuple[str, str]:
    """The rank in a launcher's prefix, "" without one, and the text of the line."""
    text = line.decode("utf-8", "replace").strip("\0\r\n")
    prefix = _PREFIX.match(text)
    if prefix is None:
        return "", text.rstrip()
    rank = _RANK.search(prefix[0])
    return next(filter(None, rank.groups()), "") if rank else "", text[prefix.end() :].rstrip()


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


_QUOTE = re.compile("[\"'`]")
_LINE_END = re.compile(rb"[\r\n]")
_EXCEPTION, _EXIT = (
    next(row for row in FAILURES if row.id == name) for name in ("python-exception", "python-exit")
)
_SAYS = [text for failure in FAILURES for text in failure.says]
_TEXTS = re.compile(_any_of([text.encode() for text in (*_SAYS, *_CHAINED, _TRACEBACK, _OURS)]))


def main(argv: list[str]) -> int:
    """Run `mpiddp explain ARGV`. Returns 0 if a failure is explained, 1 if not.

    Raises:
        UserError: bad usage, or no log that can be read.
    """
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
