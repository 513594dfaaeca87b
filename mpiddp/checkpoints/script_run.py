"""The folder of a script's run, and its records in metrics.jsonl."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mpiddp.checkpoints.records import Records
from mpiddp.checkpoints.run_dir import RunDir
from mpiddp.errors import UserError
from mpiddp.runtime.job.session import RunFiles, current

_SCALARS = (int, float, str, bool, type(None))


class ScriptRun:
    """The folder of a run. It takes records once the run knows the step from which it starts.

    A run that resumes drops the records of later steps, which it repeats, with its first own record at the
    latest: until then it may still refuse what it resumes from.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._file: Path | None = None  # on the ranks that write
        self._start: int | None = None
        self._before_drop: Callable[[], None] = lambda: None
        self._records: Records | None = None

    @property
    def path(self) -> Path:
        return self._run.path

    def start(self, step: int, *, is_writer: bool, before_drop: Callable[[], None]) -> None:
        """Take records from now on; the run starts from this step.

        Args:
            before_drop: called before the records of later steps are dropped. It renames their checkpoints.
        """
        self._file, self._start = self._run.metrics if is_writer else None, step
        self._before_drop = before_drop

    def drop_repeated(self) -> Records | None:
        """Drop the records of steps that the run repeats, once. Returns None before `start`."""
        if self._records is None and self._start is not None:
            self._before_drop()
            self._records = Records(self._file, self._start)
        return self._records

    def record(self, step: int, values: Mapping[str, Any]) -> None:
        records = self.drop_repeated()
        if records is None:
            raise UserError(
                "mpiddp.log_metrics: call Checkpoints.resume() first. It knows which records are kept."
            )
        if records.is_kept:
            plain = {name: _plain(name, value) for name, value in values.items()}
            records.write(step=step, **plain)


def run_dir() -> Path:
    """The folder of this process's run: that of the first `mpiddp.Checkpoints`.

    It may not exist yet: the first save, or `resume`, creates it.

    Raises:
        UserError: there is none yet.
    """
    return _current_run().path


def log_metrics(step: int, **values: Any) -> None:
    """Append a record to metrics.jsonl in the run's folder: `{"step": 7, "loss": 0.5}`.

    Call it on all ranks, or on rank 0. One rank of each file system writes, rank 0 among them; calls of
    other ranks do nothing. A run that resumes drops the records of the steps that it repeats. A record
    that cannot be written causes a warning.

    Args:
        step: the step of the run to which the values belong, as `Checkpoints.save` counts them.
        values: by name, numbers, strings, None, or tensors of one element, which a GPU has to compute first.

    Raises:
        TypeError: a step or a value of another type.
        UserError: there is no `mpiddp.Checkpoints`, or its `resume` has not been called.
    """
    if isinstance(step, bool) or not isinstance(step, int):
        raise TypeError(f"mpiddp.log_metrics: step: expected a whole number, not {step!r}")
    _current_run().record(step, values)


def _current_run() -> RunFiles:
    run = current().run
    if run is None:
        raise UserError(
            "there is no folder of a run yet. Create one first: mpiddp.Checkpoints('runs/a')"
        )
    return run


def _plain(name: str, value: Any) -> Any:
    if type(value) in _SCALARS:
        return value
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        return value.item()
    if hasattr(value, "numel") and value.numel() == 1:
        return value.item()
    raise TypeError(
        f"mpiddp.log_metrics: {name}: expected a number or a string, not {type(value).__name__}"
    )
