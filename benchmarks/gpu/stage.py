"""A stage, and what its function gets: its sizes, its folder, and a record that is written at once.

A record is a JSON file. It is complete after every figure, so a stage that is killed keeps what it measured.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

State = Literal["running", "passed", "failed", "stopped", "not here", "skipped"]
DONE: tuple[State, ...] = ("passed", "not here")


class Failed(Exception):
    """The stage has found something wrong, as one sentence."""


class NotHere(Exception):
    """This machine cannot show what the stage checks, as one sentence: a rehearsal has no GPU."""


@dataclass
class Record:
    """What a stage has found so far. `reason` says why it is not "passed"."""

    stage: str
    rehearsal: bool
    started: str
    state: State = "running"
    reason: str = ""
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    commands: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Context:
    """The surroundings of a stage.

    `is_tiny`: a rehearsal without a GPU, whose sizes are as small as possible. `folder` is for the stage's
    files, and `data` has CIFAR-10, or is None.
    """

    name: str
    is_tiny: bool
    folder: Path
    file: Path
    data: Path | None
    record: Record = field(init=False)
    _since: float = field(init=False, default_factory=time.monotonic)

    def __post_init__(self) -> None:
        started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        self.record = Record(self.name, self.is_tiny, started)

    def figure(self, **figures: Any) -> None:
        """Add figures to the record."""
        self.record.figures |= figures
        self.write()
        for name, value in figures.items():
            shown = json.dumps(value)
            print(f"{self.name}: {name} = {shown[:200]}", flush=True)

    def write(self) -> None:
        self.record.seconds = round(time.monotonic() - self._since, 1)
        save(self.file, asdict(self.record))

    def size(self, real: int, tiny: int) -> int:
        return tiny if self.is_tiny else real

    def require(self, condition: bool, sentence: str) -> None:
        """Raise Failed with this sentence unless the condition holds."""
        if not condition:
            raise Failed(sentence)


@dataclass(frozen=True)
class Stage:
    """A part of a group.

    `shows` names the behaviours that it proves, as docs/evidence/gpu.md lists them. Without the stage that it
    `needs` having passed, it is not started.
    """

    name: str
    run: Callable[[Context], None]
    limit_s: float
    shows: tuple[str, ...] = ()
    needs: str = ""


def run_stage(stage: Stage, context: Context) -> bool:
    """Run the stage to its end, and return whether it has passed. Its errors are in its record."""
    record = context.record
    context.write()
    try:
        stage.run(context)
        record.state = "passed"
    except NotHere as reason:
        record.state, record.reason = "not here", str(reason)
    except Exception as error:
        kind = "" if isinstance(error, Failed) else f"{type(error).__name__}: "
        record.state, record.reason = "failed", f"{kind}{error}"
    context.write()
    return record.state in DONE


def save(path: Path, values: object) -> None:
    """Replace the file in one step."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(values, indent=1) + "\n")
    part.replace(path)
