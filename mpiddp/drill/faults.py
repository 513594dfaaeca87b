"""The table of faults, one row for each, in the order of a drill, and how a rank does them to itself.

docs/drill.md explains them. A row of act "hold" comes from outside of the ranks, see `rehearse`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from mpiddp.hosts.processes import descendants, signal_all

SETTLE_S = 0.5  # before a fault: a save that runs beside the training may end
HELD_S = 60.0  # a rank waits at most so long for the signal from outside
SLOW_S = 0.05  # a step after that signal, so that a script of a few milliseconds does not end first
FIRED = "fired"  # the file that says that the fault has hit; it hits once in all attempts

Damage = Callable[[bytearray, random.Random], None]
_TEXT = (".json", ".jsonl", ".log", ".txt", ".csv", ".yaml", ".out", ".err")


def _to_all(launcher: int) -> None:
    """SIGTERM to every process of the job on this host, as a scheduler and systemd send it."""
    signal_all(lambda: {launcher: "", **descendants(launcher)}, signal.SIGTERM)


def _to_group(number: int, launcher: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.killpg(launcher, number)


def _flip_bit(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _tear(data: bytearray, rng: random.Random) -> None:
    """Cut the end off: all, one byte, or anything between."""
    del data[rng.choice((0, len(data) - 1, rng.randrange(len(data)))) :]


@dataclass(frozen=True)
class Fault:
    """One fault, and how the run goes on after it.

    act: what a rank does to itself: "", "kill", "hang", "hold" for a signal from outside, "kill in save" or
    "full in save". send: that signal, to the launcher with this pid.
    damage: what happens to the newest checkpoint before the resume.
    fewer_ranks_first, fewer_ranks_at_resume: than asked for.
    """

    name: str
    act: str = "kill"
    send: Callable[[int], None] | None = None
    damage: Damage | None = None
    fewer_ranks_first: int = 0
    fewer_ranks_at_resume: int = 0

    @property
    def changes_ranks(self) -> bool:
        return self.fewer_ranks_first != self.fewer_ranks_at_resume

    @property
    def is_of_save(self) -> bool:
        return self.act.endswith(" in save")

    @property
    def is_request(self) -> bool:
        """Whether a run may save before it ends."""
        return self.name in ("sigterm", "ctrl-c", "timeout")


FAULTS = (
    Fault("kill"),
    Fault("kill-in-save", "kill in save"),
    Fault("sigterm", "hold", _to_all),
    Fault("ctrl-c", "hold", partial(_to_group, signal.SIGINT)),
    Fault("timeout", "hold", partial(_to_group, signal.SIGTERM)),
    Fault("full", "full in save"),
    Fault("torn", damage=_tear),
    Fault("flip", damage=_flip_bit),
    Fault("fewer", fewer_ranks_at_resume=1),
    Fault("more", fewer_ranks_first=1),
    Fault("hang", "hang"),
    Fault("launcher", "hold", lambda launcher: os.kill(launcher, signal.SIGKILL)),
)
NAMES = tuple(fault.name for fault in FAULTS)
UNDISTURBED = Fault("undisturbed", act="")


@dataclass(frozen=True)
class Plan:
    """When a fault hits in the ranks of one rehearsal. The process that runs it has written the plan.

    fault: its name in the table. last: the step after which the script ends; 0 for where it ends by itself.
    in_files: ignore saves into memory; only a file can be torn.
    """

    fault: str = UNDISTURBED.name
    rank: int = 0
    step: int = 0
    last: int = 0
    in_files: bool = False

    @property
    def row(self) -> Fault:
        return next((fault for fault in FAULTS if fault.name == self.fault), UNDISTURBED)

    def write(self, folder: Path) -> None:
        (folder / "plan.json").write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Plan:
        return cls(**json.loads((folder / "plan.json").read_text(encoding="utf-8")))


class PlannedFault:
    """The fault in one rank, in one attempt."""

    def __init__(self, plan: Plan, folder: Path, rank: int) -> None:
        self._plan, self._fault, self._rank = plan, plan.row, rank
        self._fired, self._held_file = folder / FIRED, folder / f"held_{rank}"
        self._is_over = self._fired.exists()  # in an earlier attempt
        self._is_slow = False

    def after_step(self, step: int) -> None:
        if self._is_slow:
            time.sleep(SLOW_S)
        fault = self._fault
        if self._is_over or self._plan.step != step or fault.is_of_save or not fault.act:
            return
        if fault.act == "hold":
            time.sleep(SETTLE_S)
            self._held_file.touch()
            deadline = time.monotonic() + HELD_S
            while not self._fired.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            self._is_slow = True
        elif self._plan.rank == self._rank:
            time.sleep(SETTLE_S)
            self._fired.touch()
            if fault.act == "kill":
                kill()
            while True:  # "hang"
                time.sleep(1)

    def in_save(self, step: int, write: Callable[[bytes], object], data: bytes) -> None:
        """From the planned step on, write a half of each save, then die or find no space."""
        if self._is_over or self._plan.rank != self._rank or step < self._plan.step:
            return
        write(data[: len(data) // 2])
        self._fired.touch()
        if self._fault.act == "kill in save":
            kill()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def damage_newest_save(folder: Path, how: Damage, rng: random.Random) -> None:
    """Damage the weights of the newest checkpoint: the largest of the files written with the newest one."""
    found = [each for each in folder.rglob("*") if each.is_file() and not each.is_symlink()]
    stats = {each: each.stat() for each in found if each.suffix not in _TEXT}
    files = {file: stat for file, stat in stats.items() if stat.st_size >= 64}
    if not files:
        return
    newest = max(files, key=lambda file: files[file].st_mtime)
    begins = files[newest].st_mtime - 0.05
    near = (file for file in files if file.parent == newest.parent)
    together = (file for file in near if files[file].st_mtime > begins)
    victim = max(together, key=lambda file: files[file].st_size)
    data = bytearray(victim.read_bytes())
    how(data, rng)
    victim.write_bytes(data)
