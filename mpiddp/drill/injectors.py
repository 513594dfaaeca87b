"""The faults: what hits a rank from within, the job from outside, and its files afterwards.

benchmarks/faults and benchmarks/soak damage files with the same functions.
"""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from mpiddp.hosts.processes import descendants, signal_all

SETTLE_S = 0.5  # before a fault: a save that runs beside the training may end
HELD_S = 60.0  # a rank waits at most so long for the signal from outside
SLOW_S = 0.05  # a step after that signal, so that a script of a few milliseconds does not end first
_FIRED, _REACHED, _SENT = "fired", "reached", "sent"


@dataclass(frozen=True)
class Plan:
    """What the ranks of one rehearsal do to themselves, and when.

    act: "", "kill", "hang", "hold" for a signal from outside, "kill in save" or "full in save".
    last: the step after which the script ends; 0 for where it ends by itself.
    """

    act: str = ""
    rank: int = 0
    step: int = 0
    last: int = 0

    @property
    def is_of_save(self) -> bool:
        return self.act.endswith(" in save")

    def write(self, folder: Path) -> None:
        (folder / "plan.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Plan:
        return cls(**json.loads((folder / "plan.json").read_text()))


def act_in_step(plan: Plan, folder: Path, rank: int, step: int) -> None:
    """Do what the plan says after this step of this rank. An act happens once in all attempts."""
    if plan.act == "hold":
        _hold(plan, folder, rank, step)
        return
    is_here = plan.act in ("kill", "hang") and (plan.rank, plan.step) == (rank, step)
    if not is_here or (folder / _FIRED).exists():
        return
    time.sleep(SETTLE_S)
    _fire(folder)
    if plan.act == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        time.sleep(1)


def act_in_save(
    plan: Plan,
    folder: Path,
    rank: int,
    step: int,
    write: Callable[[bytes], object] | None,
    data: bytes,
) -> None:
    """In the first save of this rank from the step of the plan on: write a half, then fail or die."""
    if write is None or rank != plan.rank or step < plan.step:
        return
    if plan.act == "kill in save" and not (folder / _FIRED).exists():
        write(data[: len(data) // 2])
        _fire(folder)
        os.kill(os.getpid(), signal.SIGKILL)
    if plan.act == "full in save" and not (folder / _SENT).exists():
        write(data[: len(data) // 2])
        _fire(folder)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _hold(plan: Plan, folder: Path, rank: int, step: int) -> None:
    """Wait for the signal from outside, and make the later steps of this attempt slow."""
    sent = folder / _SENT
    if step > plan.step and (folder / _FIRED).exists() and not (folder / "resumed").exists():
        time.sleep(SLOW_S)
    if step != plan.step or sent.exists():
        return
    time.sleep(SETTLE_S)
    (folder / f"{_REACHED}_{rank}").touch()
    deadline = time.monotonic() + HELD_S
    while not sent.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def _fire(folder: Path) -> None:
    (folder / _FIRED).write_text(str(time.time()))


def has_fired(folder: Path) -> bool:
    return (folder / _FIRED).exists()


def may_go_on(folder: Path) -> None:
    """Before a resume: the disk has space again, and no step is slow."""
    (folder / _SENT).touch()
    (folder / "resumed").touch()


def send_when_held(folder: Path, ranks: int, launcher: int, send: Callable[[int], None]) -> bool:
    """Send the signal once all ranks hold. Return False while they do not."""
    if has_fired(folder):
        return True
    if not all((folder / f"{_REACHED}_{rank}").exists() for rank in range(ranks)):
        return False
    _fire(folder)
    send(launcher)
    time.sleep(0.2)  # the launcher, and a worker that dies of it, are seen before the next step
    (folder / _SENT).touch()
    return True


def to_all(launcher: int) -> None:
    """SIGTERM to every process of the job on this host, as a scheduler sends it."""
    signal_all(lambda: {launcher: "", **descendants(launcher)}, signal.SIGTERM)


def ctrl_c(launcher: int) -> None:
    """SIGINT to the process group of the launcher, as a terminal sends it."""
    os.killpg(launcher, signal.SIGINT)


def time_limit(launcher: int) -> None:
    """SIGTERM to the process group of the launcher, as `timeout` sends it."""
    os.killpg(launcher, signal.SIGTERM)


def kill_launcher(launcher: int) -> None:
    os.kill(launcher, signal.SIGKILL)


def flip_bit(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def tear(data: bytearray, rng: random.Random) -> None:
    """Cut the end off: all, one byte, or anything between."""
    del data[rng.choice((0, len(data) - 1, rng.randrange(len(data)))) :]


def damage(file: Path, how: Callable[[bytearray, random.Random], None], rng: random.Random) -> None:
    """Change the bytes of a file in place."""
    data = bytearray(file.read_bytes())
    how(data, rng)
    file.write_bytes(data)


def newest_save(folder: Path) -> Path | None:
    """The weights of the newest checkpoint: the largest of the files written with the newest one."""
    text = (".json", ".jsonl", ".log", ".txt", ".csv", ".yaml", ".out", ".err")
    found = [each for each in folder.rglob("*") if each.is_file() and not each.is_symlink()]
    files = [(each, each.stat()) for each in found if each.suffix not in text]
    files = [(file, stat) for file, stat in files if stat.st_size >= 64]
    if not files:
        return None
    newest, _ = max(files, key=lambda pair: pair[1].st_mtime)
    near = [(file, stat) for file, stat in files if file.parent == newest.parent]
    step = newest.stat().st_mtime
    together = [(file, stat) for file, stat in near if step - stat.st_mtime < 0.05]
    return max(together, key=lambda pair: pair[1].st_size)[0]
