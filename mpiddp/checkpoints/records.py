"""The small files of a run: metrics.jsonl with one record per line, and JSON files replaced as a whole.

The training matters more than these files: a record that cannot be written only causes a warning.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpiddp.checkpoints.run_dir import RunDir
from mpiddp.errors import UserError
from mpiddp.runtime.job.session import RunFiles, current
from mpiddp.runtime.log import log

_SCALARS = (int, float, str, bool, type(None))


class Records:
    """Appends records to metrics.jsonl, each at once. Without a path it writes nothing.

    A run that resumes at `step` drops the records of later steps, because it repeats these steps.
    """

    def __init__(self, path: Path | None, step: int = 0) -> None:
        self._path = path
        self._is_warned = False
        if path is None:
            return
        try:
            lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
            kept = [line for line in lines if _step_of(line) <= step]
            if kept != lines:
                _replace(path, b"".join(kept))
        except OSError as error:
            self._warn(error)

    @property
    def is_kept(self) -> bool:
        """Whether this process writes records."""
        return self._path is not None

    def write(self, **values: Any) -> None:
        if self._path is None:
            return
        try:
            _append(self._path, json.dumps(_finite(values)).encode() + b"\n")
            self._is_warned = False
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._is_warned:
            log.warning(f"warning: {self._path}: {error.strerror}.")
        self._is_warned = True


def save_json(path: Path, values: dict[str, Any]) -> None:
    """Replace the file, or on an error leave the existing one. Raises OSError."""
    _replace(path, json.dumps(_finite(values), indent=1).encode() + b"\n")


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with null in place of NaN and infinities, which JSON does not have."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def _append(path: Path, line: bytes) -> None:
    """Append the whole line or nothing."""
    with path.open("ab", buffering=0) as file:
        end = file.tell()
        if file.write(line) < len(line):
            file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _replace(path: Path, content: bytes) -> None:
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def _step_of(line: bytes) -> float:
    """The step of a record; infinity for an invalid line, such as an incomplete one."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return float("inf")


class RunRecords:
    """The records of a run in its folder. It takes them once the run knows the step from which it starts."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._records: Records | None = None
        self.is_closed = False  # then those of another run may take its place

    @property
    def path(self) -> Path:
        return self._run.path

    def start(self, step: int, *, is_writer: bool) -> None:
        """Take records from now on, and drop those of later steps, which the run repeats."""
        self._records = Records(self._run.metrics if is_writer else None, step)

    def record(self, step: int, values: Mapping[str, Any]) -> None:
        if self._records is None:
            raise UserError(
                "mpiddp.log_metrics: call Checkpoints.resume() first. It knows which records are kept."
            )
        if self._records.is_kept:
            plain = {name: _plain(name, value) for name, value in values.items()}
            self._records.write(step=step, **plain)


def run_dir() -> Path:
    """The folder of this process's run: that of the first `mpiddp.Checkpoints` that is not closed.

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
            NaN and infinities become null, because JSON has none.

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
