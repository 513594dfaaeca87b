"""The faults themselves: what a rank does to itself, signals to a job, damage to a checkpoint."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from mpiddp.hosts.processes import descendants, signal_all

Damage = Callable[[bytearray, random.Random], None]
_TEXT = (".json", ".jsonl", ".log", ".txt", ".csv", ".yaml", ".out", ".err")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    while True:
        time.sleep(1)


def to_all(launcher: int) -> None:
    """SIGTERM to every process of the job on this host, as a scheduler and systemd send it."""
    signal_all(lambda: {launcher: "", **descendants(launcher)}, signal.SIGTERM)


def ctrl_c(launcher: int) -> None:
    _to_group(signal.SIGINT, launcher)


def time_limit(launcher: int) -> None:
    """As `timeout` sends it."""
    _to_group(signal.SIGTERM, launcher)


def kill_launcher(launcher: int) -> None:
    signal_all(lambda: (launcher,), signal.SIGKILL)


def _to_group(number: int, leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.killpg(leader, number)


def flip_bit(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def tear(data: bytearray, rng: random.Random) -> None:
    """Cut the end off: all, one byte, or anything between."""
    del data[rng.choice((0, len(data) - 1, rng.randrange(len(data)))) :]


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
