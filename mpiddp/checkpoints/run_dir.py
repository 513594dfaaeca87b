"""The folder of a run: the paths of its files, and the folder of checkpoints that a user names."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mpiddp.checkpoints import directory
from mpiddp.errors import JobFailed, UserError
from mpiddp.paths import cause_of
from mpiddp.protocol.variables import is_restart


@dataclass(frozen=True)
class RunDir:
    """The paths that a run writes: its configuration, records, summary, logs and checkpoints."""

    path: Path

    @classmethod
    def of_checkpoint(cls, folder: Path) -> RunDir:
        """The run whose checkpoint lies in `folder`."""
        return cls(folder.parent.parent)

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

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
        return str(self.path)


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
