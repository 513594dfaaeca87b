"""The folder of a run: where each of its files lies, and what the command line may mean by it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mpiddp.checkpoints import directory


@dataclass(frozen=True)
class RunDir:
    """What a run writes: its configuration, records, summary, logs and checkpoints."""

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
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank_{rank:05d}.log"

    def __str__(self) -> str:
        return str(self.path)


def find_checkpoints(given: Path) -> Path | None:
    """The folder of checkpoints that `given` means, a run's folder or that folder itself, if any."""
    roots = (RunDir(given).checkpoints, given)
    return next((root for root in roots if directory.list_steps(root)), None)
