"""What the ranks of one rehearsal have recorded, and one history of steps out of all its attempts."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

State = dict[str, Any]  # see `mpiddp.drill.observer._Observer._state`


@dataclass(frozen=True)
class Attempt:
    """One process of a rank, from its start to its end. `first`: the state before its first step."""

    first: State | None
    steps: list[State]
    saves: list[State]  # of each file


@dataclass
class History:
    """The steps of one rank over all attempts. `steps[0]` is the state before the first step."""

    attempts: list[Attempt]
    steps: list[State] = field(default_factory=list)
    has_resumed: bool = False
    last_resume: int | None = None  # the step from which the last attempt went on; None if unknown

    def __post_init__(self) -> None:
        for attempt in self.attempts:
            if attempt.first is None:
                continue
            if self.steps:
                self.has_resumed = True
                self.last_resume = self.find(attempt.first["weights"])
            kept = self.steps[: (self.last_resume or 0) + 1] or [attempt.first]
            self.steps = [*kept, *attempt.steps]

    def find(self, weights: str) -> int | None:
        """The newest step after which the weights had these bits; None if there is none."""
        found = (number for number, step in enumerate(self.steps) if step["weights"] == weights)
        return max(found, default=None)


@dataclass(frozen=True)
class Recording:
    """All ranks of one rehearsal, in the order of their numbers."""

    ranks: list[History]

    @property
    def length(self) -> int:
        """The steps at the end."""
        return len(self.ranks[0].steps) - 1 if self.ranks and self.ranks[0].steps else 0

    @property
    def saves(self) -> list[State]:
        return [save for rank in self.ranks for each in rank.attempts for save in each.saves]

    @property
    def saves_files(self) -> bool:
        """Whether the script saves into files, and not into memory alone."""
        return any(save["path"] for save in self.saves)

    @property
    def saved_steps(self) -> list[int]:
        return sorted({save["step"] for save in self.saves})

    @property
    def saved_before_fault(self) -> list[int]:
        """The steps of the saves of the first attempts."""
        saves = [save for rank in self.ranks for save in rank.attempts[0].saves]
        written = [each["step"] for each in saves if each["path"] or not self.saves_files]
        return sorted({step for step in written if step < self.reached})

    @property
    def reached(self) -> int:
        """The steps of rank 0's first attempt."""
        return len(self.ranks[0].attempts[0].steps)


def file_of(folder: Path, rank: int, started_ns: int) -> Path:
    return folder / f"rank_{rank}_{started_ns}.jsonl"


def read(folder: Path) -> Recording:
    """The recording in this folder."""
    ranks = {int(file.stem.split("_")[1]) for file in folder.glob("rank_*.jsonl")}
    return Recording([History(_read_attempts(folder, rank)) for rank in sorted(ranks)])


def position(folder: Path, rank: int, weights: str) -> int:
    """The step that earlier attempts of this rank had reached with these weights; 0 if none."""
    return History(_read_attempts(folder, rank)[:-1]).find(weights) or 0


def _read_attempts(folder: Path, rank: int) -> list[Attempt]:
    """In the order of their starts. What a killed process has half written is left out."""
    found = []
    for file in sorted(folder.glob(f"rank_{rank}_*.jsonl")):  # the times have as many digits
        lines = file.read_text("utf-8").rpartition("\n")[0].splitlines()
        events = [json.loads(line) for line in lines]
        kinds = ("first", "step", "save")
        firsts, steps, saves = ([each for each in events if each["kind"] == k] for k in kinds)
        found.append(Attempt(firsts[0] if firsts else None, steps, saves))
    return found
