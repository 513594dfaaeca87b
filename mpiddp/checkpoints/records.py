"""The records of a run: `mpiddp.log_metrics` appends to metrics.jsonl, and a resume drops what it repeats.

mpiddp.log_metrics(step, loss=0.5)      # {"step": 7, "loss": 0.5}
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpiddp.checkpoints.run import RunDir
from mpiddp.errors import UserError
from mpiddp.files import replace_file
from mpiddp.protocol.variables import RUN_ID
from mpiddp.runtime.job.session import current, script_session
from mpiddp.runtime.log import log
from mpiddp.runtime.sinks import SinkRun, number_of, open_sinks
from mpiddp.world import World

_SCALARS = (int, float, str, bool, type(None))
_NO_NAME = re.compile(r"[^A-Za-z0-9_.-]+")  # what W&B allows in no id


class RunRecords:
    """Appends records to metrics.jsonl, each at once, once the run knows the step from which it starts.

    The training matters more than its records: one that cannot be written only causes a warning.
    """

    def __init__(
        self, run: RunDir, metric: str = "", config: Mapping[str, Any] | None = None
    ) -> None:
        """`metric`: the name of the value by which the best checkpoint is kept."""
        self.dir, self._metric, self.config = run, metric, config or {}
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
        numbers = {name: number_of(value) for name, value in values.items()}
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

    def began_at(self) -> float:
        """When the run began, in seconds since 1970: the time of the first line of attempts.jsonl."""
        try:
            with self.dir.attempts.open("rb") as file:
                return float(json.loads(file.readline())["at"])
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return time.time()

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
    run: RunRecords | None = current().run
    if run is None:
        raise UserError(
            "there is no folder of a run yet. Create one first: mpiddp.Checkpoints('runs/a')"
        )
    return run.dir.path


def log_metrics(step: int, **values: Any) -> None:
    """Record values of a step in the folder of the run, and in the libraries of `--log-to`.

    With `mpiddp.Checkpoints`, this appends a line to metrics.jsonl in its folder: `{"step": 7, "loss": 0.5}`.
    A run that resumes drops the lines of the steps that it repeats. With `mpiddp launch --log-to tensorboard`
    or MPIDDP_LOG_TO=tensorboard in the environment, rank 0 writes the numbers to TensorBoard too; wandb,
    mlflow and trackio are the other libraries. The status of `mpiddp launch` always shows the numbers.

    Call it on all ranks, or on rank 0. One rank of each file system writes, rank 0 among them; calls of
    other ranks do nothing. A record that cannot be written causes a warning.

    Args:
        step: the step of the run to which the values belong, as `Checkpoints.save` counts them.
        values: by name, numbers, strings, None, or tensors of one element, which a GPU has to compute first.
            NaN and infinities become null, because JSON has none. While the latest value of a name with
            "loss" in it is one of these, checkpoints count as not finite: the newest finite one is kept, and
            a resume starts from it.

    Raises:
        TypeError: a step or a value of another type.
        UserError: the `resume` of `mpiddp.Checkpoints` has not been called; a library of `--log-to` is not
            installed. Ranks that mpiddp has started, or joined, end with this error before their first step.
    """
    if isinstance(step, bool) or not isinstance(step, int):
        raise TypeError(f"mpiddp.log_metrics: step: expected a whole number, not {step!r}")
    session = script_session()
    if session.run is not None:
        session.run.record(step, values)
    session.progress.show(values)
    if session.sinks is None:
        is_writer = World.from_env().rank == 0
        session.sinks = open_sinks(_run_of_sinks(session.run, step)) if is_writer else ()
    for sink in session.sinks:
        sink.write(step, values)


def _run_of_sinks(records: RunRecords | None, step: int) -> SinkRun:
    """The run of this process for `--log-to`. `step` is the first one that it records."""
    if records is not None:
        name, began = records.dir.path.name, _when(records.began_at())
        key = _NO_NAME.sub("-", f"{name}-{began}")
        return SinkRun(key, records.dir.path, records.config, step)
    # The restarts of a job have one id.
    script, began = Path(sys.argv[0]).stem, os.environ.get(RUN_ID) or _when(time.time())
    key = _NO_NAME.sub("-", f"{script}-{began}")
    return SinkRun(key, Path("runs", key), {}, step)


def _when(seconds: float) -> str:
    """The same on all hosts, in whatever time zone a run resumes."""
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime(seconds))


def _plain(name: str, value: Any) -> Any:
    """The value as JSON has it: null in place of NaN and infinities."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if type(value) in _SCALARS:
        return value
    raise TypeError(
        f"mpiddp.log_metrics: {name}: expected a number or a string, not {type(value).__name__}"
    )
