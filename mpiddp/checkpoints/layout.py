"""The names in a run's folder. Its copy in object storage has the same."""

from __future__ import annotations

from pathlib import Path

from mpiddp.text import from_here

CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"  # what `mpiddp.log_metrics` has recorded
ATTEMPTS = "attempts.jsonl"  # how each start of the run began and ended
CONFIG, SUMMARY = "config.json", "summary.json"  # the options and the results of `mpiddp train`
WISHES = "wishes.json"  # keep, keep_every and best of its script, and the scores by which one is the best
PINS = "pins"  # pins/step_00001000: no run removes this checkpoint, by `mpiddp checkpoints pin`
REWIND = "REWIND"  # the step of the next resume, by `mpiddp checkpoints rewind`
RECORDS = (METRICS, ATTEMPTS, CONFIG, SUMMARY, WISHES)  # what a copy has beside the checkpoints


class RunDir:
    """The paths that a run writes: its records, logs and checkpoints."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / METRICS
        self.attempts = path / ATTEMPTS
        self.owner = path / "owner.json"
        self.logs = path / "logs"
        self.checkpoints = path / CHECKPOINTS

    def __str__(self) -> str:
        return from_here(self.path)
