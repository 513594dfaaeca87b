"""The records of the ranks of a rehearsal. The attempts of a rank make one history of its steps."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

State = dict[str, Any]  # see `mpiddp.drill.observer._Observer._state`
RATE = "the learning rate"  # an entry of the state after a step


@dataclass(frozen=True)
class RecordedAttempt:
    """One process of a rank, from its start to its end."""

    steps: list[State]  # before its first step, and after each
    saves: list[dict[str, Any]]  # the path of each file, and the step of its save


@dataclass
class History:
    """The steps of one rank over all attempts. `steps[0]` is the state before the first step."""

    attempts: list[RecordedAttempt]
    steps: list[State] = field(default_factory=list)
    last_resume: int | None = None  # the step from which the last attempt went on; None if unknown

    def __post_init__(self) -> None:
        for attempt in self.attempts:
            if attempt.steps and self.steps:
                self.last_resume = find(self.steps, attempt.steps[0])
            if attempt.steps:
                self.steps = [*self.steps[: self.last_resume or 0], *attempt.steps]


def find(steps: Iterable[State], state: State) -> int | None:
    """The newest step after which the weights had these bits; None if there is none."""
    numbers = (number for number, step in enumerate(steps) if step["weights"] == state["weights"])
    return max(numbers, default=None)


def read(folder: Path) -> list[History]:
    """The histories that all ranks have recorded in this folder, in the order of their numbers."""
    ranks = {int(file.stem.split("_")[1]) for file in folder.glob("rank_*.jsonl")}
    return [History(read_attempts(folder, rank)) for rank in sorted(ranks)]


def read_attempts(folder: Path, rank: int) -> list[RecordedAttempt]:
    """The attempts in the order of their starts, without a line that a killed process has half written."""
    attempts = []
    for file in sorted(folder.glob(f"rank_{rank}_*.jsonl")):  # the times have as many digits
        lines = file.read_text("utf-8").rpartition("\n")[0].splitlines()
        events = [json.loads(line) for line in lines]
        steps = [event for event in events if "weights" in event]
        attempts.append(RecordedAttempt(steps, [event for event in events if "path" in event]))
    return attempts
