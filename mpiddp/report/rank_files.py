"""What each rank left in a run's logs/: its starts, how each ended, and its step times.

rank_00003.log    of `mpiddp train`: "started: rank 3 of 8, … host gpu01, …", "failed" and a traceback
rank_00003.err    all that the rank printed on stderr: the traceback of any script
rank_00003.out    stdout, with the step times of each epoch if --per-rank-log was given
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from mpiddp.checkpoints.run_dir import RunDir
from mpiddp.explain.explain import explain
from mpiddp.explain.failures import Weight
from mpiddp.text import counted

_MAX_BYTES = 8 << 20  # the end of a longer file; a failure stands there
_NAME = re.compile(r"rank_([0-9]{5,9})\.(?:log|err|out)")
# Earlier versions have written no time zone: that of this host counts.
_TIME = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3})([+-]\d{4})? (.*)")
_STARTED = re.compile(r"started: rank \d+ of (\d+), .*?host (\S+), .*?(python \S+, torch [^\s,]+)")
_STEP_TIME = re.compile(r"num_steps_per_gpu: \d+, avg_step_time: (\d+\.?\d*)")
_TORCH = re.compile(r"\A\[rank[0-9]+\]: ?")  # before each line of a traceback
_TRACEBACK = "Traceback (most recent call last)"
_MOST_CHARACTERS = 600


@dataclass(frozen=True)
class Attempt:
    """One start of a rank, as its log has it. The times are in seconds since 1970."""

    begins: float
    num_ranks: int
    host: str
    versions: str
    ends: float | None = None  # None if the process was killed
    outcome: str = ""  # "done", "failed", or "" if the process was killed
    failure: str = ""  # the exception with which it failed


@dataclass(frozen=True)
class Failure:
    """The sentence with which a rank ended. `at` is None where only its stderr tells."""

    at: float | None
    rank: int
    host: str
    sentence: str

    @property
    def is_consequence(self) -> bool:
        """Whether another rank had failed before, where the table of known failures has the sentence."""
        found = explain([self.sentence])
        return found is not None and found.failure.weight == Weight.CONSEQUENCE


@dataclass(frozen=True)
class RankFiles:
    """One rank of a run."""

    rank: int
    attempts: list[Attempt]
    printed: str  # the exception of the last traceback on stderr
    step_times_s: list[float]  # the mean of each epoch

    @property
    def host(self) -> str:
        return self.attempts[-1].host if self.attempts else ""

    @property
    def failures(self) -> list[Failure]:
        """Those of its log. What it printed counts where the log does not tell how it ended."""
        found = [
            Failure(each.ends, self.rank, each.host, each.failure)
            for each in self.attempts
            if each.failure
        ]
        has_no_end = not self.attempts or not self.attempts[-1].outcome
        if has_no_end and self.printed:
            found.append(Failure(None, self.rank, self.host, self.printed))
        return found


def read_ranks(run: RunDir, notes: list[str], *, only_logs: bool) -> list[RankFiles]:
    """The ranks whose files lie in the run's logs/, by number. `only_logs`: not what they printed."""
    names = [path.name for path in run.logs.iterdir()] if run.logs.is_dir() else []
    numbers = {int(found[1]) for found in map(_NAME.fullmatch, names) if found}
    unreadable: list[str] = []

    def lines(path: Path) -> list[str]:
        try:
            found = () if only_logs and path.suffix != ".log" else end_of_file(path, _MAX_BYTES)
            return [line.decode(errors="replace").rstrip("\r\n") for line in found]
        except OSError:
            unreadable.append(path.name)
            return []

    ranks = []
    for rank in sorted(numbers):
        log = run.rank_log(rank)
        ranks.append(
            RankFiles(
                rank,
                _attempts(lines(log)),
                _printed(lines(log.with_suffix(".err"))),
                _step_times(lines(log.with_suffix(".out"))),
            )
        )
    if unreadable:
        what = counted(len(unreadable), "file")
        notes.append(f"{run.logs}: {what} cannot be read, {unreadable[0]} first; left out.")
    return ranks


def _attempts(lines: Iterable[str]) -> list[Attempt]:
    found: list[Attempt] = []
    for at, sentence, rest in _entries(lines):
        if started := _STARTED.match(sentence):
            found.append(Attempt(at, int(started[1]), started[2], started[3]))
        elif found and sentence in ("done", "failed"):
            failure = _exception(rest) if sentence == "failed" else ""
            found[-1] = replace(found[-1], ends=at, outcome=sentence, failure=failure)
    return found


def _entries(lines: Iterable[str]) -> list[tuple[float, str, list[str]]]:
    """The log's entries: the time, the first line, the lines below it."""
    found: list[tuple[float, str, list[str]]] = []
    for line in lines:
        if timed := _TIME.fullmatch(line):
            found.append((_seconds(timed[1], timed[2], timed[3] or ""), timed[4], []))
        elif found:
            found[-1][2].append(line)
    return found


def _printed(lines: list[str]) -> str:
    lines = [_TORCH.sub("", line) for line in lines]
    begins = [index for index, line in enumerate(lines) if _TRACEBACK in line]
    return _exception(lines[begins[-1] :]) if begins else ""


def _step_times(lines: Iterable[str]) -> list[float]:
    return [float(found[1]) for found in map(_STEP_TIME.search, lines) if found]


def _exception(lines: list[str]) -> str:
    """The exception's own line in a traceback: the first after the frames that is not indented."""
    frames = [index for index, line in enumerate(lines) if line.startswith("  File ")]
    after = lines[frames[-1] + 1 :] if frames else lines
    sentence = next((line for line in after if line and not line.startswith(" ")), "")
    return sentence[:_MOST_CHARACTERS]


def end_of_file(path: Path, most: int | None) -> Iterator[bytes]:
    """The lines of a file, or of its last `most` bytes the whole lines; none of what is no file."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        if most is not None and file.seek(0, 2) > most:
            file.seek(-most, 2)
            file.readline()  # the rest of a line
        else:
            file.seek(0)
        yield from file


def _seconds(until_second: str, milliseconds: str, zone: str) -> float:
    form = f"%Y-%m-%d %H:%M:%S{'%z' if zone else ''}"
    try:
        at = datetime.strptime(until_second + zone, form)
        return at.timestamp() + int(milliseconds) / 1000
    except (ValueError, OverflowError):
        return 0.0
