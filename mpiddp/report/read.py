"""What the folder of a run tells of it: its records, starts, saves, failures and settings.

A run may be going on, have died while it wrote, or be of another version. So every file may be missing,
torn or strange: what can be read is read, and `Run.notes` has a sentence for each thing that cannot.
Only the standard library is needed.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpiddp.checkpoints.folder import list_steps, step_of
from mpiddp.checkpoints.run import RunDir, is_locked
from mpiddp.errors import UserError
from mpiddp.paths import read_limited
from mpiddp.report.history import Save, Start, starts_of
from mpiddp.report.rank_files import RankFiles, end_of_file, read_ranks
from mpiddp.report.thinning import Curve
from mpiddp.text import counted

_MAX_JSON_BYTES = 16 << 20
_TAIL_BYTES = 1 << 20
_MAX_CURVES = 40
_NOT_CURVES = ("step", "epoch")
UNKNOWN = "-"


@dataclass(frozen=True)
class Run:
    """A run as its folder shows it."""

    path: Path
    state: str  # "running", "done", "stopped", "failed", "died" (without a word) or "ended"
    config: dict[str, Any]
    summary: dict[str, Any]
    curves: dict[str, Curve]
    saves: list[Save]
    starts: list[Start]
    ranks: list[RankFiles]
    notes: list[str]
    start_record: dict[str, Any]  # of its newest start: command, versions, git, environment

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
        """The last step that it recorded or saved."""
        recorded = [int(curve.steps[-1]) for curve in self.curves.values()]
        return max([*recorded, *(save.step for save in self.saves)], default=None)

    def shown(self, form: str, *names: str) -> str:
        """The last value of the first name that has one: the summary's at the run's end, else a record's."""
        for name in names:
            curve = self.curves.get(name)
            values = [number(self.summary, name), curve.values[-1] if curve else None]
            known = [value for value in values if value is not None]
            if known:
                return form.format(known[0 if self.state == "done" else -1])
        return UNKNOWN


def number(values: dict[str, Any], name: str) -> float | None:
    """The finite number of that name; None for anything else, as another program may write."""
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number of 400 digits
        return None


def is_run(folder: Path) -> bool:
    run = RunDir(folder)
    return run.metrics.is_file() or run.checkpoints.is_dir()


def read_run(folder: Path, *, only_end: bool = False) -> Run:
    """Read the folder of a run.

    Args:
        only_end: read the end of the records only, and nothing that ranks printed: enough for one line.

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
    curves = _curves(run.metrics, notes, only_end=only_end)
    ranks = read_ranks(run, notes, only_logs=only_end)
    saves = [Save(step_of(each), _mtime(each)) for each in list_steps(run.checkpoints)]
    is_owned, is_running = run.owner.exists(), is_locked(run.owner)
    starts = starts_of(ranks, saves, time.time() if is_running else _mtime(run.metrics))
    # Each start writes config.json anew, and the last one summary.json after it.
    if is_owned:
        state = "running" if is_running else "died"
    elif run.summary.exists() and _mtime(run.summary) >= _mtime(run.config):
        state = "done"
    elif starts:
        state = {"done": "stopped", "failed": "failed"}.get(starts[-1].outcome, "died")
    else:
        state = "ended"
    start = {} if only_end else _newest_start(run, notes)
    return Run(folder, state, config, summary, curves, saves, starts, ranks, notes, start)


def _newest_start(run: RunDir, notes: list[str]) -> dict[str, Any]:
    files = sorted((run.path / "starts").glob("start_*.json"))
    return _json(files[-1], notes) if files else {}


def _json(path: Path, notes: list[str]) -> dict[str, Any]:
    """The object in a JSON file; empty if there is none, with a note if it is broken."""
    try:
        found = json.loads(read_limited(path, _MAX_JSON_BYTES))
    except FileNotFoundError:
        return {}
    except OSError as error:
        notes.append(f"{path} cannot be read ({error.strerror}); left out.")
        return {}
    except (ValueError, RecursionError):
        notes.append(f"{path} is not JSON, as if its writing was cut off; left out.")
        return {}
    if not isinstance(found, dict):
        notes.append(f"{path} is of another program: expected a JSON object; left out.")
        return {}
    return found


def _curves(path: Path, notes: list[str], *, only_end: bool) -> dict[str, Curve]:
    """The numbers of metrics.jsonl by name. A line that is no record is skipped, and named in a note."""
    curves: dict[str, Curve] = {}
    broken: list[int] = []
    left_out: set[str] = set()
    line_number, line = 0, b"\n"
    lines = end_of_file(path, _TAIL_BYTES if only_end else None)
    for line_number, line in enumerate(lines, start=1):
        record = _record(line)
        step = number(record, "step")
        if step is None:
            broken.append(line_number)
            continue
        for name in record:
            value = None if name in _NOT_CURVES else number(record, name)
            if value is None:
                continue
            if name in curves or len(curves) < _MAX_CURVES:
                curves.setdefault(name, Curve()).add(step, value)
            else:
                left_out.add(name)
    if broken[-1:] == [line_number] and not line.endswith(b"\n"):
        broken.pop()
        notes.append(f"{path}: the last line, {line_number}, is torn; skipped.")
    if broken:
        how_many = counted(len(broken), "line")
        notes.append(
            f"{path}: {how_many} without a record; skipped. The first is line {broken[0]}."
        )
    if left_out:
        notes.append(f"{path} has more than {_MAX_CURVES} curves; {len(left_out)} are left out.")
    return curves


def _record(line: bytes) -> dict[str, Any]:
    """The object in a line, empty for any other line."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
