"""The folder of a run: the paths of its files, its records, and the checkpoints that a user names."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mpiddp.checkpoints import directory
from mpiddp.errors import JobFailed, UserError
from mpiddp.paths import cause_of, from_here, read_limited
from mpiddp.protocol.variables import is_restart
from mpiddp.runtime.job.session import RunFiles, current
from mpiddp.runtime.log import log

OWNER_STALE_S = 60.0  # an owner.json that nobody has touched for so long is a dead run's
_MAX_OWNER_BYTES = 1 << 16
_SCALARS = (int, float, str, bool, type(None))


@dataclass(frozen=True)
class RunDir:
    """The paths that a run writes: its configuration, records, summary, logs and checkpoints."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def attempts(self) -> Path:
        """A line for each start of the run, and for each rank of it that says how it ended."""
        return self.path / "attempts.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def owner(self) -> Path:
        return self.path / "owner.json"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank_{rank:05d}.log"

    def __str__(self) -> str:
        return from_here(self.path)


def unwritable(run: RunDir, error: OSError) -> UserError | JobFailed:
    """Why the run's folder cannot be written: a wrong path, or a machine that failed."""
    if cause_of(error, has_run=_has_run(run)) is UserError:
        return UserError(f"{run} cannot be written: {error.strerror}. Name another folder.")
    return JobFailed(f"{run} cannot be written: {error.strerror}.")


@contextlib.contextmanager
def writing(run: RunDir) -> Iterator[None]:
    """Run a body that writes into the run's folder. Raises the error of `unwritable`."""
    try:
        yield
    except OSError as error:
        raise unwritable(run, error) from None


def _has_run(run: RunDir) -> bool:
    with contextlib.suppress(OSError):
        return is_restart(os.environ) or run.metrics.exists()
    return True


def find_checkpoints(given: Path) -> Path | None:
    """The folder of checkpoints in `given`, a run's folder, or `given` itself. None if neither has any."""
    roots = (RunDir(given).checkpoints, given)
    return next((root for root in roots if directory.list_steps(root)), None)


# Its owner


def owner_is_alive(run: RunDir) -> bool:
    """Whether a process owns the run's folder: one of this machine, or one that touches its file."""
    try:
        owner = json.loads(read_limited(run.owner, _MAX_OWNER_BYTES))
        if owner.get("machine") == this_machine():
            return bool(start_time(owner["pid"]) == owner["started"])
        return time.time() - run.owner.stat().st_mtime < OWNER_STALE_S
    except (OSError, ValueError, KeyError, AttributeError):  # there is none, or another program's
        return False


def this_machine() -> str:
    """A name of this boot of the machine, and of the namespace of process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def start_time(pid: int) -> str:
    """When the process started, in ticks since the boot, "" if it does not exist."""
    try:
        # "pid (name) state ppid …": the 22nd field. The name may contain any bytes.
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19].decode()
    except OSError:
        return ""


# Its records


class RunRecords:
    """Appends records to metrics.jsonl, each at once, once the run knows the step from which it starts.

    The training matters more than its records: one that cannot be written only causes a warning.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._is_writer: bool | None = None  # None until the run has started
        self._is_warned = False
        self.is_closed = False

    @property
    def path(self) -> Path:
        return self._run.path

    def start(self, step: int, *, is_writer: bool) -> None:
        """Take records from now on, and drop those of later steps, which the run repeats."""
        self._is_writer = is_writer
        path = self._run.metrics
        if not is_writer:
            return
        try:
            lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
            kept = [line for line in lines if _step_of(line) <= step]
            if kept != lines:
                _replace(path, b"".join(kept))
        except OSError as error:
            self._warn(error)

    def record(self, step: int, values: Mapping[str, Any]) -> None:
        if self._is_writer is None:
            raise UserError(
                "mpiddp.log_metrics: call Checkpoints.resume() first. It knows which records are "
                "kept."
            )
        if not self._is_writer:
            return
        record = {"step": step, **{name: _plain(name, value) for name, value in values.items()}}
        try:
            _append(self._run.metrics, json.dumps(_finite(record)).encode() + b"\n")
            self._is_warned = False
        except OSError as error:
            self._warn(error)

    def note(self, **facts: Any) -> None:
        """Append a line about this start of the run to attempts.jsonl."""
        with contextlib.suppress(OSError):
            _append(self._run.attempts, json.dumps({"at": time.time(), **facts}).encode() + b"\n")

    def _warn(self, error: OSError) -> None:
        if not self._is_warned:
            log.warning(f"warning: {self._run.metrics}: {error.strerror}.")
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
    with replacing(path) as file:
        file.write(content)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` once the body has written it. Raises OSError."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.unlink(missing_ok=True)  # an open would follow a link
        with part.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


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
    current().show(values)


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
