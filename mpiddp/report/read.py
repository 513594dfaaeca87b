"""What the folder of a run tells of it: its records, starts, saves, failures and settings.

A run may be going on, have died while it wrote, or be of another version. So every file may be missing,
torn or strange: what can be read is read, and `Run.notes` has a sentence for each thing that cannot.
Only the standard library is needed.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpiddp.checkpoints.directory import list_steps, step_of
from mpiddp.checkpoints.owner import STALE_S
from mpiddp.checkpoints.run_dir import RunDir
from mpiddp.errors import UserError
from mpiddp.paths import read_limited
from mpiddp.report.rank_files import Attempt, RankFile, read_ranks
from mpiddp.report.thinning import Curve
from mpiddp.text import counted

_MAX_JSON_BYTES = 16 << 20
_TAIL_BYTES = 1 << 20
_MAX_CURVES = 40
_NOT_CURVES = ("step", "epoch")


@dataclass(frozen=True)
class Start:
    """One start of the run's rank 0. The times are in seconds since 1970, None where nothing tells them.

    `step` is the newest save's before the start: there its records begin. None if that save is gone.
    """

    begins: float
    ends: float | None
    step: int | None
    repeated_s: float | None  # what the start before had worked after that save


@dataclass(frozen=True)
class Run:
    """A run as its folder shows it."""

    path: Path
    state: str  # "running", "done", "stopped", "failed", "died" (without a word) or "ended"
    config: dict[str, Any]
    summary: dict[str, Any]
    curves: dict[str, Curve]
    saves: list[int]
    starts: list[Start]
    ranks: list[RankFile]
    notes: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float | None:
        """How long its ranks ran, over all starts whose end is known."""
        known = [start.ends - start.begins for start in self.starts if start.ends is not None]
        return sum(known) if known else number(self.summary, "wall_s")

    def last(self, name: str) -> float | None:
        """The last value of a curve."""
        curve = self.curves.get(name)
        return curve.values[-1] if curve else None

    @property
    def step(self) -> int | None:
        """The last step that it recorded or saved."""
        recorded = [curve.steps[-1] for curve in self.curves.values()]
        return max((int(step) for step in [*recorded, *self.saves]), default=None)


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


def check_run(folder: Path) -> None:
    """Raise UserError if the folder is not one of a run."""
    if not folder.exists():
        raise UserError(f"{folder} does not exist. Expected the folder of a run.")
    if not is_run(folder):
        raise UserError(
            f"{folder} is not the folder of a run: it has neither metrics.jsonl nor checkpoints/."
        )


def read_run(folder: Path, *, tail_only: bool = False) -> Run:
    """Read the folder of a run.

    Args:
        tail_only: read the end of the records only, and nothing that ranks printed: enough for one line.

    Raises:
        UserError: the folder is not one of a run.
        OSError: its records cannot be read.
    """
    check_run(folder)
    run, notes = RunDir(folder), list[str]()
    summary, config = _json(run.summary, notes), _json(run.config, notes)
    curves = _curves(run.metrics, notes, tail_only=tail_only)
    ranks = read_ranks(run, notes, only_logs=tail_only)
    checkpoints = [(step_of(each), _mtime(each)) for each in list_steps(run.checkpoints)]
    attempts = _attempts(ranks)
    state = _state(run, attempts)
    return Run(
        path=folder,
        state=state,
        config=config,
        summary=summary,
        curves=curves,
        saves=[step for step, _ in checkpoints],
        starts=_starts(attempts, checkpoints, last_sign=_last_sign(run, state)),
        ranks=ranks,
        notes=notes,
    )


def _attempts(ranks: list[RankFile]) -> list[Attempt]:
    """The starts of rank 0. One that was killed ended when the first other rank failed, if one did."""
    own = next((each.attempts for each in ranks if each.rank == 0), [])
    failed = sorted(
        each.ends
        for rank in ranks
        for each in rank.attempts
        if each.outcome == "failed" and each.ends is not None
    )
    begins = [each.begins for each in own] + [float("inf")]
    whole = []
    for attempt, next_begins in zip(own, begins[1:], strict=True):
        within = [at for at in failed if attempt.begins <= at < next_begins]
        killed = attempt.ends is None and within
        whole.append(Attempt(attempt.begins, within[0], "failed") if killed else attempt)
    return whole


def _state(run: RunDir, attempts: list[Attempt]) -> str:
    if run.owner.exists():
        return "running" if time.time() - _mtime(run.owner) < STALE_S else "died"
    # Each start writes config.json anew, the last one summary.json after it.
    if run.summary.exists() and _mtime(run.summary) >= _mtime(run.config):
        return "done"
    if not attempts:
        return "ended"
    return {"done": "stopped", "failed": "failed"}.get(attempts[-1].outcome, "died")


def _last_sign(run: RunDir, state: str) -> float:
    """When the run last wrote, for a start whose end nothing tells."""
    return time.time() if state == "running" else _mtime(run.metrics)


def _starts(
    attempts: list[Attempt], checkpoints: list[tuple[int, float]], *, last_sign: float
) -> list[Start]:
    """The starts, each with the save from which it went on."""
    starts: list[Start] = []
    for number_of_start, attempt in enumerate(attempts):
        ends = attempt.ends
        if ends is None and number_of_start == len(attempts) - 1:
            ends = max(last_sign, attempt.begins)
        earlier = [(step, saved) for step, saved in checkpoints if saved < attempt.begins]
        before = starts[-1] if starts else None
        step = repeated = None
        if before is None:
            step = 0
        elif earlier:
            step, saved = earlier[-1]
            if before.ends is not None and saved >= before.begins:
                repeated = max(0.0, before.ends - saved)
        starts.append(Start(attempt.begins, ends, step, repeated))
    return starts


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


def _curves(path: Path, notes: list[str], *, tail_only: bool) -> dict[str, Curve]:
    """The numbers of metrics.jsonl by name. A line that is no record is skipped, and named in a note."""
    curves: dict[str, Curve] = {}
    broken: list[int] = []
    left_out: set[str] = set()
    last, is_torn = 0, False
    for line_number, line in _lines(path, tail_only=tail_only):
        record, last = _record(line), line_number
        is_torn = record is None and not line.endswith(b"\n")
        if record is None:
            broken.append(line_number)
            continue
        step = number(record, "step")
        if step is None:
            broken.append(line_number)
            continue
        for name in record:
            value = None if name in _NOT_CURVES else number(record, name)
            if value is None:
                continue
            if name not in curves and len(curves) == _MAX_CURVES:
                left_out.add(name)
                continue
            curves.setdefault(name, Curve()).add(step, value)
    if is_torn:
        broken.pop()
        notes.append(f"{path}: the last line, {last}, is torn; skipped.")
    if broken:
        lines = counted(len(broken), "line")
        notes.append(f"{path}: {lines} without a record; skipped. The first is line {broken[0]}.")
    if left_out:
        notes.append(f"{path} has more than {_MAX_CURVES} curves; {len(left_out)} are left out.")
    return curves


def _lines(path: Path, *, tail_only: bool) -> Iterator[tuple[int, bytes]]:
    if not path.is_file():
        return
    with path.open("rb") as file:
        if tail_only and file.seek(0, 2) > _TAIL_BYTES:
            file.seek(-_TAIL_BYTES, 2)
            file.readline()  # the rest of a line
        else:
            file.seek(0)
        yield from enumerate(file, start=1)


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
