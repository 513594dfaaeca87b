"""What the ranks of one rehearsal have recorded, and one history of steps out of all its attempts."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

# Python's tempfile, hex digits as of a uuid, a step.
_NUMBERS = re.compile(r"tmp[a-z0-9_]{8}|[0-9a-f]{4,}|[0-9]+")
State = dict[str, Any]  # see `mpiddp.drill.observer._Observer._state`


@dataclass(frozen=True)
class Attempt:
    """One process of a rank, from its start to its end. `first`: the state before its first step."""

    rank: int
    host: str
    at: float
    first: State | None
    steps: list[State]
    saves: list[State]  # of each file

    @property
    def files_of_saves(self) -> list[list[State]]:
        """The files of each save, which a thread may write while the training makes steps.

        A save ends where one of its files, numbers aside, comes again at another step.
        """
        found: list[list[State]] = []
        steps: dict[str, int] = {}
        for file in self.saves:
            name, step = without_numbers(file["path"]), file["step"]
            if not found or steps.setdefault(name, step) != step:
                found.append([])
                steps = {name: step}
            found[-1].append(file)
        return found


@dataclass
class History:
    """The steps of one rank over all attempts. `steps[0]` is the state before the first step."""

    attempts: list[Attempt]
    steps: list[State] = field(default_factory=list)
    resumed_from: list[int | None] = field(default_factory=list)  # of the later attempts

    def __post_init__(self) -> None:
        for attempt in self.attempts:
            if attempt.first is None:
                continue
            at: int | None = 0
            if self.steps:
                at = find(self.steps, attempt.first["weights"])
                self.resumed_from.append(at)
            self.steps = [*(self.steps[: (at or 0) + 1] or [attempt.first]), *attempt.steps]

    @property
    def last_resume(self) -> int | None:
        """The step that the last attempt has resumed from; None if unknown, or without one."""
        return self.resumed_from[-1] if self.resumed_from else None


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
        """The steps at which saves began."""
        attempts = [attempt for rank in self.ranks for attempt in rank.attempts]
        return sorted({files[0]["step"] for each in attempts for files in each.files_of_saves})

    @property
    def resumed_from(self) -> int | None:
        """The step that rank 0 has resumed from last; None if its weights were those of no step."""
        return self.ranks[0].last_resume if self.ranks else None

    @property
    def reached(self) -> int:
        """The steps of rank 0's first attempt."""
        return len(self.ranks[0].attempts[0].steps)

    def saved_before_fault(self, undisturbed: Recording) -> list[int]:
        """The steps of the saves that were complete: with as many files as those of the undisturbed run."""
        found = []
        for own, whole in zip(self.ranks, undisturbed.ranks, strict=False):
            complete = min(map(len, whole.attempts[0].files_of_saves), default=0)
            for files in own.attempts[0].files_of_saves:
                has_file = any(file["path"] for file in files) or not undisturbed.saves_files
                if has_file and len(files) >= complete:
                    found.append(files[0]["step"])
        return [step for step in found if step < self.reached]

    def ranks_beside(self, host: str) -> list[int]:
        """The ranks that run on other hosts."""
        return [n for n, rank in enumerate(self.ranks) if rank.attempts[0].host != host]

    @property
    def longest_step_s(self) -> float:
        times = [step["at"] for step in self.ranks[0].steps[1:]] if self.ranks else []
        return max((b - a for a, b in pairwise(times)), default=1.0)

    def samples(self) -> Counter[int]:
        """How often each sample was in the steps that count."""
        steps = (step for rank in self.ranks for step in rank.steps[1:])
        return Counter(number for step in steps for number in step["samples"])


def without_numbers(path: str) -> str:
    """The same text for the files of one kind of all steps: numbers, and the random names of new files."""
    return _NUMBERS.sub("0", path)


def find(steps: list[State], weights: str) -> int | None:
    """The newest step after which the weights had these bits; None if there is none."""
    matches = (number for number in range(len(steps) - 1, -1, -1))
    return next((number for number in matches if steps[number]["weights"] == weights), None)


def read(folder: Path) -> Recording:
    """The recording in this folder. What a killed process has half written is left out."""
    attempts: dict[int, list[Attempt]] = {}
    for file in sorted(folder.glob("rank_*.jsonl"), key=_started):
        attempt = _read_attempt(file)
        if attempt is not None:
            attempts.setdefault(attempt.rank, []).append(attempt)
    return Recording([History(attempts[rank]) for rank in sorted(attempts)])


def position(folder: Path, rank: int, weights: str) -> int:
    """The step that earlier attempts of this rank had reached with these weights; 0 if none."""
    attempts = (
        _read_attempt(file) for file in sorted(folder.glob(f"rank_{rank}_*.jsonl"), key=_started)
    )
    earlier = [each for each in attempts if each is not None][:-1]
    return find(History(earlier).steps, weights) or 0


def _started(file: Path) -> int:
    found = re.fullmatch(r"rank_\d+_(\d+)\.jsonl", file.name)
    return int(found[1]) if found else 0


def _read_attempt(file: Path) -> Attempt | None:
    lines = file.read_text().rpartition("\n")[0].splitlines()
    events = [json.loads(line) for line in lines]
    if not events:
        return None
    start = events[0]
    by_kind: dict[str, list[State]] = {"first": [], "step": [], "save": []}
    for event in events[1:]:
        by_kind[event["kind"]].append(event)
    first = by_kind["first"][0] if by_kind["first"] else None
    return Attempt(
        start["rank"], start["host"], start["at"], first, by_kind["step"], by_kind["save"]
    )
