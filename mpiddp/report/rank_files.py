"""What each rank left in a run's logs/: its log, its output, and how each start of it ended.

rank_00003.log    of `mpiddp train`: "started: rank 3 of 8, … host gpu01, …", "failed" and a traceback
rank_00003.err    all that the rank printed on stderr: the traceback of any script
rank_00003.out    stdout, with the step times of each epoch if --per-rank-log was given
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from mpiddp.checkpoints.run_dir import RunDir
from mpiddp.text import counted

_MAX_BYTES = 8 << 20  # the end of a longer file; a failure stands there
_NAME = re.compile(r"rank_([0-9]{5,9})\.(log|err|out)")
_TIME = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) (.*)")
_STARTED = re.compile(r"started: rank \d+ of (\d+), .*?host (\S+), .*?(python \S+, torch [^\s,]+)")
_STEP_TIME = re.compile(r"num_steps_per_gpu: \d+, avg_step_time: (\d+\.?\d*)")
_TRACEBACK = "Traceback (most recent call last)"
_MOST_CHARACTERS = 600


@dataclass
class Attempt:
    """One start of a rank, as its log has it. It is filled in line by line."""

    begins: float  # seconds since 1970
    ends: float | None = None  # None if the process was killed
    outcome: str = ""  # "done", "failed", or "" if the process was killed


@dataclass
class RankFile:
    """One rank of a run."""

    rank: int
    world_size: int | None = None
    host: str = ""
    versions: str = ""
    attempts: list[Attempt] = field(default_factory=list)
    failure: str = ""  # the last line of its last traceback
    step_times_s: list[float] = field(default_factory=list)  # the mean of each epoch


def read_ranks(run: RunDir, notes: list[str], *, only_logs: bool) -> list[RankFile]:
    """The ranks whose files lie in the run's logs/, by number. `only_logs`: not what they printed."""
    names = sorted(path.name for path in run.logs.iterdir()) if run.logs.is_dir() else []
    ranks: dict[int, RankFile] = {}
    unreadable: list[str] = []
    for match in filter(None, map(_NAME.fullmatch, names)):
        rank, kind = int(match[1]), match[2]
        if only_logs and kind != "log":
            continue
        each = ranks.setdefault(rank, RankFile(rank))
        try:
            _READ[kind](each, _lines(run.logs / match[0]))
        except OSError:
            unreadable.append(match[0])
    if unreadable:
        what = counted(len(unreadable), "file")
        notes.append(f"{run.logs}: {what} cannot be read, {unreadable[0]} first; left out.")
    return [ranks[rank] for rank in sorted(ranks)]


def _read_log(rank: RankFile, lines: Iterator[str]) -> None:
    failing: list[str] = []
    for line in lines:
        timed = _TIME.fullmatch(line)
        if timed is None:
            failing.append(line)
            continue
        at, sentence = _seconds(timed[1], timed[2]), timed[3]
        if started := _STARTED.match(sentence):
            rank.world_size, rank.host = int(started[1]), started[2]
            rank.versions = started[3]
            rank.attempts.append(Attempt(at))
        elif sentence in ("done", "failed") and rank.attempts:
            rank.attempts[-1].ends, rank.attempts[-1].outcome = at, sentence
            failing = []
    outcome = rank.attempts[-1].outcome if rank.attempts else ""
    if outcome:  # else it was killed, and stderr may say more
        rank.failure = _end_of_traceback(failing) if outcome == "failed" else ""


def _read_err(rank: RankFile, lines: Iterator[str]) -> None:
    """The failure of any script. The log of `mpiddp train`, read after it, knows of later starts."""
    found: list[str] = []
    for line in lines:
        if _TRACEBACK in line:
            found = []
        found.append(line)
    if found and _TRACEBACK in found[0]:
        rank.failure = _end_of_traceback(found)


def _read_out(rank: RankFile, lines: Iterator[str]) -> None:
    rank.step_times_s = [float(found[1]) for found in map(_STEP_TIME.search, lines) if found]


# Files are read in the order of their names: .err before .log before .out.
_READ = {"log": _read_log, "err": _read_err, "out": _read_out}


def _end_of_traceback(lines: list[str]) -> str:
    """The exception's own line: the first after the frames that is not indented."""
    frames = [index for index, line in enumerate(lines) if line.startswith("  File ")]
    after = lines[frames[-1] + 1 :] if frames else lines
    sentence = next((line for line in after if line and not line.startswith(" ")), "")
    return sentence[:_MOST_CHARACTERS]


def _lines(path: Path) -> Iterator[str]:
    if not path.is_file():
        return
    with path.open("rb") as file:
        if file.seek(0, 2) > _MAX_BYTES:
            file.seek(-_MAX_BYTES, 2)
            file.readline()
        else:
            file.seek(0)
        for line in file:
            yield line.decode(errors="replace").rstrip("\r\n")


def _seconds(until_second: str, milliseconds: str) -> float:
    try:
        return datetime.fromisoformat(until_second).timestamp() + int(milliseconds) / 1000
    except (ValueError, OverflowError):
        return 0.0
