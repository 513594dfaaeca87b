"""Which checkpoints of a run are kept, as its folder says it to every process, host and bucket."""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mpiddp.checkpoints import folders
from mpiddp.checkpoints.folders import COMPLETE, PINS, WISHES, step_of, steps_among
from mpiddp.files import read_limited, replace_file


@dataclass(frozen=True)
class Wishes:
    """Which checkpoints of a run are kept.

    Attributes:
        keep: number of the newest verified checkpoints, and of checkpoints that are set aside; None
            if nobody has said it, and then nothing is removed.
        keep_every: steps: the first checkpoint at or after each multiple stays.
        best: a metric, and "min" or "max": the checkpoint whose step has its best value stays.
        scores: by metric and step, the values of every metric that has been `best` in this run.
        pins: the steps of pinned checkpoints.
    """

    keep: int | None = None
    keep_every: int | None = None
    best: Sequence[str] | None = None
    scores: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    pins: Collection[int] = ()

    @classmethod
    def parse(cls, content: bytes, pins: Collection[int]) -> Wishes:
        """Read the wishes in wishes.json. If the file is missing or foreign, nobody has said `keep`."""
        try:
            table = json.loads(content)
            scores, best = table.pop("scores"), table["best"]
            if not any(isinstance(by_step, dict) for by_step in scores.values()):
                # Before scores had the name of their metric, they belonged to `best`.
                scores = {best[0]: scores} if best else {}
            return cls(**table, scores=numbers_of(scores), pins=pins)
        except (ValueError, TypeError, LookupError, AttributeError):
            return cls(pins=pins)

    def write(self, run: Path) -> None:
        """Write them into a run's folder, without the pins, which are files of their own. Raises OSError."""
        table = {name: value for name, value in asdict(self).items() if name != "pins"}
        replace_file(run / WISHES, json.dumps(table).encode())

    def best_step(self, steps: Collection[int]) -> int | None:
        """The one of these steps with the best score; None if none has a score of this metric."""
        if self.best is None:
            return None
        metric, direction = self.best
        scores, sign = self.scores.get(metric, {}), 1 if direction == "min" else -1
        scored = [step for step in steps if step in scores]
        return min(scored, key=lambda step: sign * scores[step], default=None)

    def spared(self, steps: Collection[int]) -> set[int]:
        """The steps that stay although newer ones are verified."""
        best = self.best_step(steps)
        spared = {*self.pins} if best is None else {*self.pins, best}
        if self.keep_every is not None:
            first = {step // self.keep_every: step for step in sorted(steps, reverse=True)}
            spared |= {step for multiple, step in first.items() if multiple > 0}
        return spared


def numbers_of(scores: Mapping[str, Mapping[Any, Any]]) -> dict[str, dict[int, float]]:
    """Scores by metric and step as they were before JSON, whose keys are texts."""
    return {
        metric: {int(step): float(score) for step, score in by_step.items()}
        for metric, by_step in scores.items()
    }


def pinned_in(run: Path) -> set[int]:
    """The steps of the checkpoints that are pinned in a run's folder."""
    folder = run / PINS
    return {step_of(pin) for pin in steps_among(folder.iterdir() if folder.is_dir() else ())}


def read_file(run: Path, name: str) -> bytes:
    """The contents of a small file of a run's folder, b"" if it is missing. Raises OSError."""
    return read_limited(run / name, folders.MAX_BYTES) if (run / name).exists() else b""


def surplus(
    checkpoints: Sequence[Path],
    aside: Sequence[Path],
    wishes: Wishes,
    is_good: Callable[[Path], bool],
) -> list[Path]:
    """The checkpoints, and those set `aside`, that no wish keeps. Both come the oldest first.

    A checkpoint counts for `keep` if it `is_good`, which is asked only until enough of them are good.
    """
    if wishes.keep is None:
        return []
    spared = wishes.spared([step_of(folder) for folder in checkpoints])
    num_kept, rest = 0, []
    for folder in reversed(checkpoints):
        if num_kept < wishes.keep:
            num_kept += is_good(folder)
        elif step_of(folder) not in spared:
            rest.append(folder)
    rest += [folder for folder in aside[: -wishes.keep] if step_of(folder) not in wishes.pins]
    return rest


def prune(root: Path, wishes: Wishes, *, is_good: Callable[[Path], bool]) -> list[Path]:
    """Remove what no wish keeps, unless a reader holds it, and return what was removed."""
    aside = folders.list_steps(root, set_aside=True)
    rest = surplus(folders.list_steps(root), aside, wishes, is_good)
    rest += root.glob(
        folders.hidden(root, "received-*").name
    )  # shards of other hosts, for a resume
    return [folder for folder in rest if remove_unless_held(folder)]


def remove_unless_held(folder: Path) -> bool:
    with contextlib.ExitStack() as opened:
        with contextlib.suppress(OSError):  # a broken checkpoint may lack COMPLETE
            file = opened.enter_context((folder / COMPLETE).open("r+b"))
            try:
                folders.lock(file, fcntl.LOCK_EX)
            except BlockingIOError:
                return False
        hidden = folders.hide(folder)
    folders.remove_hidden(hidden)  # after the close: over NFS, an open file would keep its folder
    return True
