"""The records of a run: `mpiddp.log_metrics` appends to metrics.jsonl, and a resume drops what it repeats.

mpiddp.log_metrics(step, loss=0.5)      # {"step": 7, "loss": 0.5}
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpiddp.checkpoints.run import RunDir
from mpiddp.errors import UserError
from mpiddp.files import replace_file
from mpiddp.runtime.job.session import current
from mpiddp.runtime.log import log

_SCALARS = (int, float, str, bool, type(None))


class RunRecords:
    """Appends records to metrics.jsonl, each at once, once the run knows the step from which it starts.

    The training matters more than its records: one that cannot be written only causes a warning.
    """

    def __init__(self, run: RunDir, metric: str = "") -> None:
        """`metric`: the name of the value by which the best checkpoint is kept."""
        self.dir, self._metric = run, metric
        self._latest: dict[str, float] = {}  # finite value of the metric
        # By name, the losses whose latest value is not finite.
        self._not_finite: dict[str, str] = {}
        self._is_writer: bool | None = None  # None until the run has started
        self._is_warned = False
        self.is_closed = False

    def start(self, step: int, *, is_writer: bool) -> None:
        """Take records from now on, and drop those of later steps, which the run repeats."""
        self._is_writer, path = is_writer, self.dir.metrics
        if not is_writer:
            return
        try:
            lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
            kept = [line for line in lines if _step_of(line) <= step]
            if kept != lines:
                replace_file(path, b"".join(kept))
        except OSError as error:
            self._warn(error)

    def facts(self) -> dict[str, Any]:
        """What a checkpoint tells of the records: why the latest loss is not finite, or ""; the metric."""
        return {"not_finite": next(iter(self._not_finite.values()), ""), "metrics": self._latest}

    def record(self, step: int, values: Mapping[str, Any]) -> None:
        if self._is_writer is None:
            raise UserError(
                "mpiddp.log_metrics: call Checkpoints.resume() first. It knows which records are "
                "kept."
            )
        if not self._is_writer:
            return
        numbers = {name: _number(value) for name, value in values.items()}
        for name, value in numbers.items():
            self._not_finite.pop(name, None)
            if "loss" in name and isinstance(value, float) and not math.isfinite(value):
                self._not_finite[name] = f"{name} of step {step} is {value}"
        record = {"step": step, **{name: _plain(name, value) for name, value in numbers.items()}}
        if isinstance(latest := record.get(self._metric), (int, float)):
            self._latest = {self._metric: latest}
        try:
            _append(self.dir.metrics, record)
            self._is_warned = False
        except OSError as error:
            self._warn(error)

    def note(self, **facts: Any) -> None:
        """Append a line about this start of the run to attempts.jsonl."""
        with contextlib.suppress(OSError):
            _append(self.dir.attempts, {"at": time.time(), **facts})

    def _warn(self, error: OSError) -> None:
        if not self._is_warned:
            log.warning(f"warning: {self.dir.metrics}: {error.strerror}.")
        self._is_warned = True


def _append(path: Path, values: Mapping[str, Any]) -> None:
    line = json.dumps(values).encode() + b"\n"
    with path.open("ab", buffering=0) as file:  # written at its end: one line, in one piece
        end = file.tell()
        if file.write(line) < len(line):  # the disk is full; the next line may find space again
            file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _step_of(line: bytes) -> float:
    """The step of a record; infinity for an invalid line, such as an incomplete one."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return float("inf")


def run_dir() -> Path:
    """The folder of this process's run: that of the first `mpiddp.Checkpoints` that is not closed.

    It may not exist yet: the first save, or `resume`, creates it.

    Raises:
        UserError: there is none yet.
    """
    return _current_run().dir.path


def log_metrics(step: int, **values: Any) -> None:
    """Append a record to metrics.jsonl in the run's folder: `{"step": 7, "loss": 0.5}`.

    Call it on all ranks, or on rank 0. One rank of each file system writes, rank 0 among them; calls of
    other ranks do nothing. A run that resumes drops the records of the steps that it repeats. A record
    that cannot be written causes a warning.

    Args:
        step: the step of the run to which the values belong, as `Checkpoints.save` counts them.
        values: by name, numbers, strings, None, or tensors of one element, which a GPU has to compute first.
            NaN and infinities become null, because JSON has none. While the latest value of a name with
            "loss" in it is one of these, checkpoints count as not finite: the newest finite one is kept, and
            a resume starts from it.

    Raises:
        TypeError: a step or a value of another type.
        UserError: there is no `mpiddp.Checkpoints`, or its `resume` has not been called.
    """
    if isinstance(step, bool) or not isinstance(step, int):
        raise TypeError(f"mpiddp.log_metrics: step: expected a whole number, not {step!r}")
    _current_run().record(step, values)
    current().progress.show(values)


def _current_run() -> RunRecords:
    run: RunRecords | None = current().run
    if run is None:
        raise UserError(
            "there is no folder of a run yet. Create one first: mpiddp.Checkpoints('runs/a')"
        )
    return run


def _number(value: Any) -> Any:
    """The element of a tensor or an array of one."""
    if hasattr(value, "item") and getattr(value, "size", None) != 0:
        with contextlib.suppress(RuntimeError, ValueError):  # it has several elements
            return value.item()
    return value


def _plain(name: str, value: Any) -> Any:
    """The value as JSON has it: null in place of NaN and infinities."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if type(value) in _SCALARS:
        return value
    raise TypeError(
        f"mpiddp.log_metrics: {name}: expected a number or a string, not {type(value).__name__}"
    )
