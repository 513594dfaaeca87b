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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpiddp.checkpoints.folders import RunDir
from mpiddp.errors import UserError
from mpiddp.files import replace_file
from mpiddp.protocol.variables import RUN_ID
from mpiddp.runtime.job.session import current, script_session
from mpiddp.runtime.rank_log import log, log_to_console
from mpiddp.sinks import Sink, SinkRun, open_sinks
from mpiddp.world import World

_SCALARS = (int, float, str, bool, type(None))
_NO_NAME = re.compile(r"[^A-Za-z0-9_.-]+")  # W&B refuses these characters in an id


class RunRecords:
    """Appends records to metrics.jsonl, each at once, once the run knows the step from which it starts.

    The training matters more than its records: one that cannot be written only causes a warning.

    Attributes:
        first: the first step of this process.
        scores: by metric and step, the values by which the best checkpoint is kept. An earlier start
            of the run may have had another metric, which may become `best` again.
        is_writer: this rank writes them.
        has_recorded: the script calls `mpiddp.log_metrics` on this rank, whether it writes or not.
    """

    def __init__(
        self, run: RunDir, metric: str = "", config: Mapping[str, Any] | None = None
    ) -> None:
        self.dir, self._metric, self.config, self.first = run, metric, config or {}, 0
        self.scores: dict[str, dict[int, float]] = {}
        self.is_writer = self.has_started = False
        self._is_warned = self.is_closed = self.has_recorded = False

    def start(self, step: int, *, is_writer: bool) -> None:
        """Take records from now on, and drop those after `step`, -1 for none, which the run repeats."""
        self.is_writer, self.has_started, self.first, path = (
            is_writer,
            True,
            step + 1,
            self.dir.metrics,
        )
        for by_step in self.scores.values():
            for at in [at for at in by_step if at > step]:
                del by_step[at]
        if not is_writer:
            return
        try:
            lines, kept = path.read_bytes().splitlines(keepends=True) if path.is_file() else [], []
            for line in lines:
                record = _record_in(line)
                if type(at := record.get("step", "")) in (int, float) and at <= step:
                    kept.append(line)
                    self._note_score(int(at), record)
            if kept != lines:
                replace_file(path, b"".join(kept))
        except OSError as error:
            self._warn(error)

    def record(self, step: int, values: Mapping[str, Any]) -> None:
        self.has_recorded = True
        if not self.is_writer:
            return
        record = {"step": step, **{name: _plain(name, value) for name, value in values.items()}}
        self._note_score(step, record)
        try:
            _append(self.dir.metrics, record)
            self._is_warned = False
        except OSError as error:
            self._warn(error)

    def add_scores(self, scores: Mapping[str, Mapping[int, float]]) -> None:
        """Add scores that rank 0 or an earlier start of the run knows, by metric and step."""
        for metric, by_step in scores.items():
            self.scores.setdefault(metric, {}).update(by_step)

    def _note_score(self, step: int, record: Mapping[str, Any]) -> None:
        if type(score := record.get(self._metric, "")) in (int, float):
            self.add_scores({self._metric: {step: score}})

    def add_event(self, **facts: Any) -> None:
        """Append a line to attempts.jsonl."""
        with contextlib.suppress(OSError):
            _append(self.dir.attempts, {"at": time.time(), **facts})

    def began_at(self) -> float:
        """When the run began, in seconds since 1970: the time of its first event."""
        with contextlib.suppress(OSError), self.dir.attempts.open("rb") as lines:
            return next(
                (record["at"] for record in map(_record_in, lines) if "at" in record), time.time()
            )
        return time.time()

    def _warn(self, error: OSError) -> None:
        if not self._is_warned:
            log.warning(f"warning: {self.dir.metrics}: {error.strerror}.")
        self._is_warned = True


# By process: a forked child has none, and writes nothing.
_runs: dict[int, list[RunRecords]] = {}
_sinks: dict[int, Sequence[Sink] | None] = {}  # once a process has logged; None but on rank 0


def _append(path: Path, values: Mapping[str, Any]) -> None:
    line = json.dumps(values).encode() + b"\n"
    with path.open("ab", buffering=0) as file:  # without a buffer, a line is appended in one piece
        end = file.tell()
        if file.write(line) < len(line):  # the disk is full; the next line may find space again
            file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _record_in(line: bytes) -> dict[str, Any]:
    """The record of a line, {} if there is none, because a full disk has cut it, for example."""
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(record := json.loads(line), dict):
            return record
    return {}


def run_dir() -> Path:
    """The folder of this process's run: that of the first `mpiddp.Checkpoints` that is not closed.

    It may not exist yet: the first save, or `resume`, creates it.

    Raises:
        UserError: there is none yet.
    """
    runs = open_runs()
    if not runs:
        raise UserError(
            "there is no folder of a run yet.", fix="create one first: mpiddp.Checkpoints('runs/a')"
        )
    return runs[0].dir.path


def log_metrics(step: int, **values: Any) -> None:
    """Record values of a step in the folder of each open run, and in the libraries of `--log-to`.

    With `mpiddp.Checkpoints`, this appends a line to metrics.jsonl in its folder: `{"step": 7, "loss": 0.5}`.
    With `mpiddp launch --log-to tensorboard` or MPIDDP_LOG_TO=tensorboard in the environment, rank 0 writes
    the numbers to TensorBoard too; `mpiddp launch --help-all` names the other libraries. The launcher's
    status shows the values of rank 0, and `mpiddp top` its `loss` or `train_loss`.

    Call it on all ranks, or on rank 0: one rank of each file system writes, and warns if it cannot.

    Args:
        step: the step of the run to which the values belong, as `Checkpoints.save` counts them. A value of
            the metric of `best` is the score of the checkpoint of this step, before or after its save.
        values: by name, numbers, strings, None, or tensors of one element, which a GPU has to compute first.
            NaN and infinities become null, because JSON has none.

    Raises:
        TypeError: a step or a value of another type.
        UserError: the `resume` of `mpiddp.Checkpoints` has not been called; a library of `--log-to` is not
            installed. Ranks that mpiddp has started, or joined, end with this error before their first step.
    """
    if isinstance(step, bool) or not isinstance(step, int):
        raise TypeError(f"mpiddp.log_metrics: step: expected a whole number, not {step!r}")
    session = script_session()
    runs = open_runs()
    if runs and not runs[0].has_started:
        sentence = "mpiddp.log_metrics comes before Checkpoints.resume(), which decides which records are kept."
        raise UserError(sentence, fix="call resume() first")
    if (process := os.getpid()) not in _sinks:
        rank = World.from_env(current().env).rank
        log_to_console(rank)  # a script that has not joined may have no other handler
        _sinks[process] = None if rank else open_sinks(_run_of_sinks(runs, step))
    sinks = _sinks[process]
    is_used = sinks is not None or any(records.is_writer for records in runs)
    # The other ranks do not wait for a GPU that computes a tensor.
    plain = {name: _element(value) for name, value in values.items()} if is_used else {}
    for records in runs:
        records.record(step, plain)
    session.progress.show(plain)
    for sink in sinks or ():
        sink.write(step, plain)


def open_runs() -> list[RunRecords]:
    """The records of the open runs of this process; those of the first one if all are closed."""
    return [records for records in runs() if not records.is_closed] or runs()[:1]


def runs() -> list[RunRecords]:
    """Those of this process. It forgets closed ones when another one begins."""
    return _runs.setdefault(os.getpid(), [])


def _run_of_sinks(runs: Sequence[RunRecords], step: int) -> SinkRun:
    """The run of this process for `--log-to`. Without `mpiddp.Checkpoints`, `step` is its first."""
    if runs:
        records = runs[0]
        name, began = records.dir.path.name, _when(records.began_at())
        key = _NO_NAME.sub("-", f"{name}-{began}")
        return SinkRun(key, records.dir.path, records.config, records.first)
    # The restarts of a job have one id.
    script, began = Path(sys.argv[0]).stem, current().env.get(RUN_ID) or _when(time.time())
    key = _NO_NAME.sub("-", f"{script}-{began}")
    return SinkRun(key, Path("runs", key), {}, step)


def _when(seconds: float) -> str:
    """The time as a text that does not depend on the time zone of a host."""
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime(seconds))


def _element(value: Any) -> Any:
    """The element of a tensor or an array of one; any other value as it is."""
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
