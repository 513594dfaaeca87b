"""When a fault hits, in the ranks of one rehearsal. The process that runs it has written the plan."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

SETTLE_S = 0.5  # before a fault: a save that runs beside the training may end
HELD_S = 60.0  # a rank waits at most so long for the signal from outside
SLOW_S = 0.05  # a step after that signal, so that a script of a few milliseconds does not end first
FIRED = "fired"  # the file that says that the fault has hit; it hits once in all attempts


@dataclass(frozen=True)
class Plan:
    """What the ranks of one rehearsal do to themselves, and when.

    act: "", "kill", "hang", "hold" for a signal from outside, "kill in save" or "full in save".
    last: the step after which the script ends; 0 for where it ends by itself.
    in_files: ignore saves into memory; only a file can be torn.
    ahead: the batches that the script has got when it first calls its model.
    """

    act: str = ""
    rank: int = 0
    step: int = 0
    last: int = 0
    in_files: bool = False
    ahead: int = 1

    @property
    def is_of_save(self) -> bool:
        return self.act.endswith(" in save")

    def write(self, folder: Path) -> None:
        (folder / "plan.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Plan:
        return cls(**json.loads((folder / "plan.json").read_text()))


class PlannedFault:
    """The fault in one rank, in one attempt."""

    def __init__(self, plan: Plan, folder: Path, rank: int) -> None:
        self._plan, self._rank, self._fired = plan, rank, folder / FIRED
        self._held_file = folder / f"held_{rank}"
        self._is_over = self._fired.exists()  # in an earlier attempt
        self._is_slow = False

    def after_step(self, step: int) -> None:
        plan = self._plan
        if self._is_slow:
            time.sleep(SLOW_S)
        if self._is_over or plan.step != step or plan.is_of_save or not plan.act:
            return
        if plan.act == "hold":
            time.sleep(SETTLE_S)
            self._held_file.touch()
            deadline = time.monotonic() + HELD_S
            while not self._fired.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            self._is_slow = True
        elif plan.rank == self._rank:
            time.sleep(SETTLE_S)
            self._fired.touch()
            if plan.act == "kill":
                kill()
            while True:  # "hang"
                time.sleep(1)

    def in_save(self, step: int, write: Callable[[bytes], object], data: bytes) -> None:
        """From the planned step on, write a half of each save, then die or find no space."""
        plan = self._plan
        if self._is_over or plan.rank != self._rank or step < plan.step:
            return
        write(data[: len(data) // 2])
        self._fired.touch()
        if plan.act == "kill in save":
            kill()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
