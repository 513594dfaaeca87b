"""The table of faults, in the order of a drill. docs/try.md explains them."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mpiddp.hosts.processes import descendants, signal_all

PLAN = "plan.json"  # the file with the `FaultPlan`
FIRED = (
    "fired"  # the file that says that the step of the fault has come; it comes once in all attempts
)
_LEAST_BYTES = 64  # a smaller file has no weights
_ONE_SAVE_S = 0.05  # the files of one save are written within this time
_TEXT = (".json", ".jsonl", ".log", ".txt", ".csv", ".yaml", ".out", ".err")


def _terminate(launcher: int) -> None:
    """Send SIGTERM to all processes of the job on this host, as a scheduler and systemd do."""
    signal_all(lambda: {launcher: "", **descendants(launcher)}, signal.SIGTERM)


@dataclass(frozen=True)
class Fault:
    """One fault, and how the run goes on after it.

    acts: what the drill does to the job when its step has come, by the pid of the launcher. Without it, the rank
    at that step sends SIGKILL to itself.
    ends: the run ends by the fault, and resumes. Otherwise it has to go on by itself.
    flips: one bit of the newest checkpoint changes before the resume.
    fewer: the resume has so many ranks less.
    """

    name: str
    acts: Callable[[int], None] | None = None
    ends: bool = True
    flips: bool = False
    fewer: int = 0


FAULTS = (
    Fault("kill"),
    Fault("sigterm", _terminate),
    Fault("flip", flips=True),
    Fault("fewer", fewer=1),
)
NAMES = tuple(fault.name for fault in FAULTS)
UNDISTURBED = Fault("undisturbed", ends=False)


@dataclass(frozen=True)
class FaultPlan:
    """When a fault hits in the ranks of one rehearsal. The drill writes it, and the observers read it.

    hits: whether one does. kills: the rank sends SIGKILL to itself. last: the step after which the script
    ends; 0 if it ends by itself. folder: its working folder; "" for that of the launcher.
    """

    hits: bool = False
    kills: bool = False
    rank: int = 0
    step: int = 0
    last: int = 0
    folder: str = ""


def flip_newest_save(folder: Path, rng: random.Random) -> None:
    """Flip one bit of the newest checkpoint: of the largest file that was written with the newest one."""
    paths = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    stats = {path: path.stat() for path in paths if path.suffix not in _TEXT}
    files = {path: stat for path, stat in stats.items() if stat.st_size >= _LEAST_BYTES}
    if not files:
        return
    newest = max(files, key=lambda path: files[path].st_mtime)
    begins = files[newest].st_mtime - _ONE_SAVE_S
    of_save = [p for p in files if p.parent == newest.parent and files[p].st_mtime > begins]
    victim = max(of_save, key=lambda path: files[path].st_size)
    data = bytearray(victim.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    victim.write_bytes(data)
