"""`mpiddp runs DIR`: a line for each run in a folder.

    mpiddp runs runs

It reads JSON from the folder of a run, and nothing else:

config.json, summary.json    the settings and the results of `mpiddp train`
metrics.jsonl                a record of each step that was logged; only the end of the file is read
attempts.jsonl               how each start of the run began and ended

A run may be going on, may have died while it wrote a line, or may be of another version. So every file may be
missing, torn or strange. All that can be read is shown, and "-" stands for the rest.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpiddp.arguments import OneSentenceParser
from mpiddp.errors import DONE, UserError, named_by
from mpiddp.files import is_locked
from mpiddp.text import align_columns, as_json, duration, escaped

_HEAD = ("RUN", "STATE", "STEP", "ACCURACY", "LOSS", "RATE", "DURATION")
_TAIL_BYTES = 1 << 18
_LARGEST = 1e300
UNKNOWN = "-"


def main(argv: list[str]) -> int:
    """Run `mpiddp runs ARGV`.

    Raises:
        UserError: bad usage, or DIR contains no run, or cannot be read.
        JobFailed: a disk has failed.
    """
    parser = OneSentenceParser(
        prog="mpiddp runs",
        description="List the runs of a folder with state, step, accuracy, loss, rate and duration.",
        allow_abbrev=False,
    )
    parser.add_argument("dir", metavar="DIR", nargs="?", default="runs", help="(default: runs)")
    parser.add_argument("--json", action="store_true", help="print them as JSON")
    options = parser.parse_args(argv)
    folder = Path(options.dir)
    with named_by(""):
        runs = _runs([folder]) or _runs(sorted(folder.iterdir()))
    if not runs:
        raise UserError(f"{folder} contains no run. Expected a folder of runs, or of one run.")
    if options.json:
        print(as_json("runs", {"runs": [run.facts() for run in runs]}))
        return DONE
    rows = [_HEAD, *(run.row() for run in runs)]
    columns = [column for column in zip(*rows, strict=True) if set(column[1:]) != {UNKNOWN}]
    right = [index for index, (name, *_) in enumerate(columns) if name not in ("RUN", "STATE")]
    print(align_columns(list(zip(*columns, strict=True)), right=right))
    return DONE


@dataclass
class Start:
    """One start of the run, from attempts.jsonl. Times are in seconds since 1970."""

    begins: float
    ends: float | None = None  # None as long as no rank has written how the start ended
    outcome: str = ""  # "done", "stopped" or "failed"
    step: int | None = None  # the last step that rank 0 has made


@dataclass(frozen=True)
class RunSummary:
    """A run, as its folder shows it."""

    path: Path
    state: str  # or in parentheses the reason why the folder cannot be read
    step: int | None = None  # the last step, None if no file has it
    seconds: float | None = None  # the time of all starts whose end is known
    # By name, the value in the summary, or else in the latest record. If that is not finite, it is NaN.
    values: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def row(self) -> tuple[str, ...]:
        """Its line in the table, with the columns of _HEAD."""

        def text(form: str, name: str) -> str:
            value = self.values.get(name)
            if value is None:
                return UNKNOWN
            return "nan" if math.isnan(value) else form.format(value)

        return (
            escaped(self.name),
            self.state,
            UNKNOWN if self.step is None else f"{self.step:,}",
            text("{:.2%}", "test_accuracy"),
            text("{:.4g}", "train_loss"),
            text("{:,.0f} images/s", "images_per_s"),
            UNKNOWN if self.seconds is None else duration(self.seconds),
        )

    def facts(self) -> dict[str, Any]:
        """Its entry in the output of --json. JSON has no NaN, so null stands for it."""

        def finite(name: str) -> float | None:
            value = self.values.get(name)
            return None if value is None or math.isnan(value) else value

        return {
            "path": str(self.path),
            "name": self.name,
            "state": self.state,
            "step": self.step,
            "test_accuracy": finite("test_accuracy"),
            "train_loss": finite("train_loss"),
            "images_per_s": finite("images_per_s"),
            "wall_s": self.seconds,
        }


def _runs(folders: Sequence[Path]) -> list[RunSummary]:
    """The folders that are runs, and those that cannot be read, for example of another user."""
    runs = []
    for folder in folders:
        try:
            if is_run(folder):
                runs.append(read_run(folder))
        except OSError as error:
            runs.append(RunSummary(folder, f"({error.strerror})"))
    return runs


def is_run(folder: Path) -> bool:
    """Whether this is the folder of a run. Raises OSError if it may not be read."""
    if folder.is_dir():
        next(folder.iterdir(), None)  # raises OSError, which is_file() hides from Python 3.14 on
    return (folder / "metrics.jsonl").is_file() or (folder / "checkpoints").is_dir()


def read_run(folder: Path) -> RunSummary:
    """Read the folder of a run. Raises OSError if its records cannot be read."""
    names = ("config.json", "summary.json", "metrics.jsonl")
    config, summary, metrics = (folder / name for name in names)
    # `mpiddp train` writes config.json at each start, and summary.json after its last step.
    is_complete = _mtime(summary) >= _mtime(config) > 0
    results = _object(summary) if is_complete else {}
    step, values = _records(metrics)
    starts = _starts(folder / "attempts.jsonl")
    is_running = is_locked(folder / "owner.json")
    if starts and starts[-1].ends is None:  # its last record shows how long it has lived
        last = time.time() if is_running else _mtime(metrics)
        starts[-1].ends = max(last, starts[-1].begins)
    lengths = [start.ends - start.begins for start in starts if start.ends is not None]
    if is_running:
        state = "running"
    elif results:
        state = "done"
    elif starts:
        outcome = starts[-1].outcome or "failed"
        # `mpiddp train` has a configuration, and without a summary it has not made its last step.
        state = "stopped" if outcome == "done" and _object(config) else outcome
    else:
        state = "failed" if (folder / "owner.json").exists() else UNKNOWN
    saved = (path.name[5:] for path in (folder / "checkpoints").glob("step_*"))
    steps = [step, starts[-1].step if starts else None, *map(int, filter(str.isdecimal, saved))]
    values |= {name: value for name in results if (value := number(results, name)) is not None}
    if "loss" in values:
        values.setdefault("train_loss", values["loss"])
    return RunSummary(
        folder,
        state,
        step=max((value for value in steps if value is not None), default=None),
        seconds=sum(lengths) if lengths else values.get("wall_s"),
        values=values,
    )


def _records(path: Path) -> tuple[int | None, dict[str, float]]:
    """The step of the last record, and the latest value of each name."""
    step: int | None = None
    values: dict[str, float] = {}
    for record in _lines(path, _TAIL_BYTES):
        at = number(record, "step")
        if at is None:
            continue
        step = int(at)
        for name, value in record.items():
            if value is None or type(value) in (int, float):
                finite = number(record, name)
                values[name] = math.nan if finite is None else finite
    return step, values


def _starts(path: Path) -> list[Start]:
    """The starts. Rank 0 writes how a start has ended, and any other rank writes how it has failed."""
    starts: list[Start] = []
    for line in _lines(path):
        at, event = number(line, "at"), line.get("event")
        if at is None:
            continue
        if event == "started":
            starts.append(Start(at))
        elif event == "ended" and starts:
            start, rank, step = starts[-1], number(line, "rank") or 0, number(line, "step")
            if (
                not rank or start.ends is None
            ):  # rank 0's clock counts, because it has timed the beginning
                start.ends = max(at, start.begins)
            if not rank and step is not None:
                start.step = int(step)
            has_failed = line.get("failure") or start.outcome == "failed"
            start.outcome = "failed" if has_failed else str(line.get("outcome", ""))
    return starts


def number(values: dict[str, Any], name: str) -> float | None:
    """The finite number of that name; None for any other value, because another program may write here."""
    value: Any = values.get(name)
    is_number = type(value) in (int, float) and abs(value) < _LARGEST  # false for NaN
    return float(value) if is_number else None


def _object(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} if there is none."""
    with suppress(OSError, ValueError, RecursionError):
        if isinstance(value := json.loads(path.read_bytes()), dict):
            return value
    return {}


def _lines(path: Path, most: int | None = None) -> Iterator[dict[str, Any]]:
    """The objects in the lines of a file, or of its last `most` bytes. Other lines are left out."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        if most is not None and path.stat().st_size > most:
            file.seek(-most, 2)
            file.readline()  # a part of a line
        for line in file:
            try:
                value = json.loads(line.decode())  # json would guess the encoding of bytes
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict):
                yield value


def _mtime(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0
