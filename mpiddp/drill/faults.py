"""The table of faults, one row for each, in the order of a drill; what comes from outside of the ranks.

docs/drill.md explains them. What a rank does to itself is in `mpiddp.drill.plan`.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mpiddp.hosts.processes import descendants, signal_all

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

    act: what a rank does to itself (`plan.Plan.act`). send: the signal from outside, with act "hold".
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


def damage_newest_save(folder: Path, how: Damage, rng: random.Random) -> None:
    """Damage the weights of the newest checkpoint: the largest of the files written with the newest one."""
    found = [each for each in folder.rglob("*") if each.is_file() and not each.is_symlink()]
    files = {each: each.stat() for each in found if each.suffix not in _TEXT}
    files = {file: stat for file, stat in files.items() if stat.st_size >= 64}
    if not files:
        return
    newest = max(files, key=lambda file: files[file].st_mtime)
    last = files[newest].st_mtime
    near = [file for file in files if file.parent == newest.parent]
    together = [file for file in near if last - files[file].st_mtime < 0.05]
    victim = max(together, key=lambda file: files[file].st_size)
    data = bytearray(victim.read_bytes())
    how(data, rng)
    victim.write_bytes(data)
