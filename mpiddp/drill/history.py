"""What the ranks of one rehearsal have recorded, and one history of steps out of all its attempts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

State = dict[str, Any]  # see `mpiddp.drill.observer._Observer._state`
RATE = (
    "the learning rate"  # an entry of the state after a step; before the first one, none is known
)


@dataclass(frozen=True)
class RecordedAttempt:
    """One process of a rank, from its start to its end. `first`: the state before its first step."""

    first: State | None
    steps: list[State]
    saves: list[dict[str, Any]]  # of each file: its path, and the step


@dataclass
class History:
    """The steps of one rank over all attempts. `steps[0]` is the state before the first step."""

    attempts: list[RecordedAttempt]
    steps: list[State] = field(default_factory=list)
    has_resumed: bool = False
    last_resume: int | None = None  # the step from which the last attempt went on; None if unknown

    def __post_init__(self) -> None:
        for attempt in self.attempts:
            if attempt.first is None:
                continue
            if self.steps:
                self.has_resumed = True
                self.last_resume = find(self.steps, attempt.first)
            kept = self.steps[: (self.last_resume or 0) + 1] or [attempt.first]
            self.steps = [*kept, *attempt.steps]


@dataclass(frozen=True)
class Recording:
    """All ranks of one rehearsal, in the order of their numbers."""

    ranks: list[History]

    @property
    def length(self) -> int:
        """The steps at the end."""
        return len(self.ranks[0].steps) - 1 if self.ranks and self.ranks[0].steps else 0

    @property
    def reached(self) -> int:
        """The steps of rank 0's first attempt."""
        return len(self.ranks[0].attempts[0].steps)

    def saved_steps(self, attempts: slice = slice(None)) -> list[int]:
        """The steps at which any rank has called torch.save, in these attempts."""
        of_ranks = (attempt for rank in self.ranks for attempt in rank.attempts[attempts])
        return sorted({save["step"] for attempt in of_ranks for save in attempt.saves})


def find(steps: Iterable[State], state: State) -> int | None:
    """The newest step after which the weights had these bits; None if there is none."""
    numbers = (number for number, step in enumerate(steps) if step["weights"] == state["weights"])
    return max(numbers, default=None)


def file_of(folder: Path, rank: int, started_ns: int) -> Path:
    return folder / f"rank_{rank}_{started_ns}.jsonl"


def read(folder: Path) -> Recording:
    """The recording in this folder."""
    ranks = {int(file.stem.split("_")[1]) for file in folder.glob("rank_*.jsonl")}
    return Recording([History(read_attempts(folder, rank)) for rank in sorted(ranks)])


def read_attempts(folder: Path, rank: int) -> list[RecordedAttempt]:
    """In the order of their starts. What a killed process has half written is left out."""
    attempts = []
    for file in sorted(folder.glob(f"rank_{rank}_*.jsonl")):  # the times have as many digits
        lines = file.read_text("utf-8").rpartition("\n")[0].splitlines()
        events = [json.loads(line) for line in lines]
        kinds = ("first", "step", "save")
        firsts, steps, saves = ([event for event in events if event["kind"] == k] for k in kinds)
        attempts.append(RecordedAttempt(firsts[0] if firsts else None, steps, saves))
    return attempts
