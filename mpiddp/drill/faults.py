"""The table of faults, one row for each, in the order of a drill, and how they hit.

docs/drill.md explains them.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path

SETTLE_S = 0.5  # before a fault: a save that runs beside the training may end
SLOW_S = 0.05  # a step after the fault, so that a script of a few milliseconds does not end before a signal
FIRED = "fired"  # the file that says that the fault has hit; it hits once in all attempts
_LEAST_BYTES = 64  # of a file with weights
_TEXT = (".json", ".jsonl", ".log", ".txt", ".csv", ".yaml", ".out", ".err")


@dataclass(frozen=True)
class Fault:
    """One fault, and how the run goes on after it.

    number: the signal. At a step, a rank sends SIGKILL to itself; SIGTERM comes from outside of the ranks, to
    all processes of the job on this host, as a scheduler and systemd send it.
    flips: one bit of the newest checkpoint changes before the resume.
    fewer: the resume has so many ranks less.
    """

    name: str
    number: int = signal.SIGKILL
    flips: bool = False
    fewer: int = 0


FAULTS = (
    Fault("kill"),
    Fault("sigterm", signal.SIGTERM),
    Fault("flip", flips=True),
    Fault("fewer", fewer=1),
)
NAMES = tuple(fault.name for fault in FAULTS)
UNDISTURBED = "undisturbed"


@dataclass(frozen=True)
class FaultPlan:
    """When a fault hits in the ranks of one rehearsal. The process that runs it has written the plan.

    fault: its name in the table. last: the step after which the script ends; 0 for where it ends by itself.
    """

    fault: str = UNDISTURBED
    rank: int = 0
    step: int = 0
    last: int = 0

    def write(self, folder: Path) -> None:
        (folder / "plan.json").write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> FaultPlan:
        return cls(**json.loads((folder / "plan.json").read_text(encoding="utf-8")))


class PlannedFault:
    """The fault in one rank, in one attempt."""

    def __init__(self, plan: FaultPlan, folder: Path, rank: int) -> None:
        self._plan, self._rank, self._fired = plan, rank, folder / FIRED
        self._row = next((fault for fault in FAULTS if fault.name == plan.fault), None)
        self._is_over = self._row is None or self._fired.exists()  # in an earlier attempt

    def after_step(self, step: int) -> None:
        """Called after each step of this rank, with its number."""
        if self._is_over or self._row is None or step < self._plan.step:
            return
        if step == self._plan.step and self._rank == self._plan.rank:
            time.sleep(SETTLE_S)
            self._fired.touch()
            if self._row.number == signal.SIGKILL:
                os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(SLOW_S)


def flip_newest_save(folder: Path, rng: random.Random) -> None:
    """Flip one bit of the newest checkpoint: of the largest file that was written with the newest one."""
    paths = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    stats = {path: path.stat() for path in paths if path.suffix not in _TEXT}
    files = {path: stat for path, stat in stats.items() if stat.st_size >= _LEAST_BYTES}
    if not files:
        return
    newest = max(files, key=lambda path: files[path].st_mtime)
    begins = files[newest].st_mtime - 0.05
    near = (path for path in files if path.parent == newest.parent)
    together = (path for path in near if files[path].st_mtime > begins)
    victim = max(together, key=lambda path: files[path].st_size)
    data = bytearray(victim.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    victim.write_bytes(data)
