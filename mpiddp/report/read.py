"""What the folder of a run tells of it, from JSON alone: records, starts, saves, failures and settings.

config.json, summary.json, metrics.jsonl    the settings, the results, a record of each step
attempts.jsonl                              how each start began, what its GPUs did, how its ranks ended

A run may be going on, have died while it wrote, or be of another version. So every file may be missing,
torn or strange: what can be read is read, and `Run.notes` has a sentence for each file that cannot.
"""

from __future__ import annotations

import json
import time
from array import array
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpiddp.checkpoints.folder import list_steps, step_of
from mpiddp.checkpoints.records import RunDir
from mpiddp.checkpoints.run import is_locked
from mpiddp.errors import UserError
from mpiddp.explain.explain import explain
from mpiddp.explain.failures import Weight
from mpiddp.text import counted

_TAIL_BYTES = 1 << 18
_MAX_CURVES = 40
_NOT_CURVES = ("step", "epoch")
_LARGEST = 1e300
UNKNOWN = "-"


class Curve:
    """The values of one name by step, in steps that increase.

    A step that comes again replaces what it repeats: its records were written before a restart.
    nan_since: the first of the last steps whose value is no number.
    """

    def __init__(self) -> None:
        self.steps, self.values = array("d"), array("d")
        self.nan_since: int | None = None

    def add(self, step: float, value: float | None) -> None:
        """Add a value; None for one that is no number."""
        if value is None:
            self.nan_since = int(step) if self.nan_since is None else self.nan_since
            return
        self.nan_since = None
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            self.values.pop()
        self.steps.append(step)
        self.values.append(value)

    def thinned(self, parts: int) -> tuple[array[float], array[float]]:
        """At most 2 * `parts` points, in order: the smallest and the largest value of each part of the steps.

        A mean would hide the one loss that explodes among a thousand.
        """
        steps, values = self.steps, self.values
        if len(steps) <= 2 * parts:
            return steps, values
        kept: dict[int, None] = {}
        for part in range(parts):
            begin, end = part * len(steps) // parts, (part + 1) * len(steps) // parts
            within = values[begin:end]
            extremes = {begin + within.index(min(within)), begin + within.index(max(within))}
            kept |= dict.fromkeys(sorted(extremes))
        return array("d", [steps[i] for i in kept]), array("d", [values[i] for i in kept])


@dataclass(frozen=True)
class Failure:
    """The sentence with which a rank ended. Times are in seconds since 1970."""

    at: float
    rank: int
    host: str
    sentence: str

    @property
    def is_consequence(self) -> bool:
        """Whether another rank had failed before, where the table of known failures has the sentence."""
        found = explain([self.sentence])
        return found is not None and found.failure.weight == Weight.CONSEQUENCE


@dataclass
class Start:
    """One start of the run. What no file tells, as after the loss of a host, is None or empty."""

    begins: float
    step: int  # of the save from which it went on
    hosts: list[str]  # of each rank
    versions: str
    ends: float | None = None
    outcome: str = ""  # "done", "stopped" or "failed"
    made: int | None = None  # the last step of rank 0
    failures: list[Failure] = field(default_factory=list)
    gpus: list[dict[str, Any]] = field(default_factory=list)  # see `mpiddp.launch.gpu_use`

    @property
    def failure(self) -> str:
        """The sentence of the first rank to fail, by the order in the file: the hosts' clocks may differ."""
        return next((each.sentence for each in self.failures if not each.is_consequence), "")


@dataclass(frozen=True)
class Run:
    """A run as its folder shows it."""

    path: Path
    state: str  # running, done, stopped, failed, - for one of an earlier version, (why it cannot be read)
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)
    saves: dict[int, float] = field(default_factory=dict)  # seconds since 1970, by step
    starts: list[Start] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def seconds(self) -> float | None:
        """How long its ranks ran, over all starts whose end is known."""
        known = [start.ends - start.begins for start in self.starts if start.ends is not None]
        return sum(known) if known else number(self.summary, "wall_s")

    @property
    def step(self) -> int | None:
        """The last step that it made, as far as its files tell: a script may record every 50th only."""
        known = [int(curve.steps[-1]) for curve in self.curves.values() if curve.steps]
        known += [start.made for start in self.starts[-1:] if start.made is not None]
        return max([*known, *self.saves], default=None)

    def latest(self, *names: str) -> float | None:
        """The value of the first name that has one, now: the summary's, else that of the last record."""
        for name in names:
            value, curve = number(self.summary, name), self.curves.get(name)
            if value is None and curve and curve.nan_since is None:
                value = curve.values[-1]
            if value is not None:
                return value
        return None

    def shown(self, form: str, *names: str) -> str:
        """The text of `latest`, or since when the value is not a number, as far as that was read."""
        for name in names:
            curve = self.curves.get(name)
            if curve and curve.nan_since is not None:
                since = f" since step {curve.nan_since:,}" if curve.steps else ""
                return f"nan{since}"
            if (value := self.latest(name)) is not None:
                return form.format(value)
        return UNKNOWN


def number(values: dict[str, Any], name: str) -> float | None:
    """The finite number of that name; None for anything else, as another program may write."""
    value: Any = values.get(name)
    is_number = type(value) in (int, float) and abs(value) < _LARGEST  # not NaN either
    return float(value) if is_number else None


def is_run(folder: Path) -> bool:
    """Whether it is the folder of a run. Raises OSError for one that may not be read."""
    if folder.is_dir():
        next(folder.iterdir(), None)  # is_file() hides its error, from Python 3.14 on
    run = RunDir(folder)
    return run.metrics.is_file() or run.checkpoints.is_dir()


def read_run(folder: Path, *, only_end: bool = False) -> Run:
    """Read the folder of a run.

    Args:
        only_end: read the end of the records only: enough for one line.

    Raises:
        UserError: the folder is not one of a run.
        OSError: its records cannot be read.
    """
    if not folder.exists():
        raise UserError(f"{folder} does not exist. Expected the folder of a run.")
    if not is_run(folder):
        raise UserError(
            f"{folder} is not the folder of a run: it has neither metrics.jsonl nor checkpoints/."
        )
    run, notes = RunDir(folder), list[str]()
    config, summary = _json(run.config, notes), _json(run.summary, notes)
    # `mpiddp train` writes config.json at each start, and summary.json after its last step.
    if not _mtime(run.summary) >= _mtime(run.config) > 0:
        summary = {}
    curves = _curves(run.metrics, notes, only_end=only_end)
    saves = {step_of(each): _mtime(each) for each in list_steps(run.checkpoints)}
    is_running = is_locked(run.owner)
    starts = _starts(run, notes)
    if starts and starts[-1].ends is None:  # nothing else tells when it ended
        last = time.time() if is_running else _mtime(run.metrics)
        starts[-1].ends = max(last, starts[-1].begins)
    state = "failed" if run.owner.exists() else UNKNOWN
    if is_running:
        state = "running"
    elif summary:
        state = "done"
    elif starts:
        is_cut = starts[-1].outcome == "done" and bool(config)
        state = "stopped" if is_cut else starts[-1].outcome or "failed"
    return Run(folder, state, config, summary, curves, saves, starts, notes)


def _starts(run: RunDir, notes: list[str]) -> list[Start]:
    """The starts, from attempts.jsonl. Rank 0 tells how it ended, any other rank how it failed."""
    starts: list[Start] = []
    for line in _lines(run.attempts, notes):
        at, step = number(line, "at"), number(line, "step")
        if at is not None and step is not None and line.get("event") == "started":
            hosts = line.get("hosts")
            named = [str(each) for each in hosts] if isinstance(hosts, list) else []
            starts.append(Start(at, int(step), named, str(line.get("versions", ""))))
        elif starts and line.get("event") == "gpus" and isinstance(line.get("ranks"), list):
            starts[-1].gpus = [each for each in line["ranks"] if isinstance(each, dict)]
        elif at is not None and starts and line.get("event") == "ended":
            start, rank = starts[-1], int(number(line, "rank") or 0)
            if line.get("failure"):
                failure = Failure(at, rank, str(line.get("host", "")), str(line["failure"]))
                start.failures.append(failure)
            made = number(line, "step")
            start.made = start.made if made is None or rank else int(made)
            if not rank or start.ends is None:  # rank 0's clock is that of the begin
                start.ends = max(at, start.begins)
            start.outcome = "failed" if start.failures else str(line.get("outcome", ""))
    return starts


def _json(path: Path, notes: list[str]) -> dict[str, Any]:
    """The object in a JSON file; empty if there is none, with a note if it is broken."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        return found
    notes.append(f"{path} cannot be read as a JSON object; left out.")
    return {}


def _curves(path: Path, notes: list[str], *, only_end: bool) -> dict[str, Curve]:
    """The numbers of metrics.jsonl by name."""
    curves = defaultdict[str, Curve](Curve)
    for record in _lines(path, notes, _TAIL_BYTES if only_end else None):
        step = number(record, "step")
        if step is None:
            continue
        for name, given in record.items():
            value = number(record, name)
            is_nan = given is None or isinstance(given, float)  # JSON has no NaN
            has_room = name in curves or len(curves) < _MAX_CURVES
            if (value is not None or is_nan) and has_room and name not in _NOT_CURVES:
                curves[name].add(step, value)
    if len(curves) == _MAX_CURVES:
        notes.append(f"{path}: at most {_MAX_CURVES} curves are shown.")
    return curves


def _lines(path: Path, notes: list[str], most: int | None = None) -> Iterator[dict[str, Any]]:
    """The records in the lines of a file, or of its last `most` bytes. One note counts the others."""
    if not path.is_file():
        return
    left_out = 0
    with path.open("rb") as file:
        if most is not None and file.seek(0, 2) > most:
            file.seek(-most, 2)
            file.readline()  # the rest of a line
        else:
            file.seek(0)
        for line in file:
            try:
                found = json.loads(line.decode())  # else it would guess the encoding
            except (ValueError, RecursionError):
                found = None
            if isinstance(found, dict):
                yield found
            else:
                left_out += 1
    if left_out:
        notes.append(f"{path}: {counted(left_out, 'line')} without a record.")


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
