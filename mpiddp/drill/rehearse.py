"""One rehearsal: the undisturbed run, or one with a fault and its resume, in a folder of its own."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from mpiddp.drill.command import Command
from mpiddp.drill.faults import FIRED, UNDISTURBED, Fault, Plan, damage_newest_save
from mpiddp.drill.records import Recording, read
from mpiddp.errors import DONE
from mpiddp.hosts.processes import kill_marked, marked
from mpiddp.protocol.variables import DRILL, OBSERVER

UNDISTURBED_S = 3600.0  # for the undisturbed run
_LEAST_S = 60.0  # for any other command, or four times as long as the undisturbed one
_END_S = 5.0  # for processes to end after the launcher
_POLL_S = 0.02


class Ended(NamedTuple):
    """A command that has ended: its code, its stderr, and the number of its processes that still ran.

    The code is None for one that took too long.
    """

    code: int | None
    said: str
    leftover: int = 0


@dataclass(frozen=True)
class Rehearsal:
    """What happened. `ended`: the first command and the resume. `injected`: whether the fault has hit."""

    injected: bool
    ended: list[Ended]
    seconds: float
    recording: Recording

    @property
    def codes(self) -> tuple[int | None, ...]:
        return tuple(each.code for each in self.ended)

    @property
    def leftover(self) -> int:
        """The processes of this host that still ran after a command had ended."""
        return sum(each.leftover for each in self.ended)


@dataclass(frozen=True)
class Drill:
    """Rehearsals of one command, each in a new folder below `work`.

    last: the step that ends every run; 0 for where the script ends.
    """

    command: Command
    work: Path
    last: int
    seed: int

    def undisturbed(self) -> Rehearsal:
        return self._rehearse(UNDISTURBED, Plan(last=self.last), UNDISTURBED_S)

    def run(self, fault: Fault, undisturbed: Rehearsal) -> Rehearsal:
        limit_s = max(_LEAST_S, 4 * undisturbed.seconds)
        hang_s = 5 + round(undisturbed.seconds) if fault.act == "hang" else 0
        plan = self._plan(fault, undisturbed.recording)
        return self._rehearse(fault, plan, limit_s, hang_s)

    def _plan(self, fault: Fault, undisturbed: Recording) -> Plan:
        """When the fault hits: after the first save, if the undisturbed run has saved, and before its end."""
        saved, length = undisturbed.saved_steps, undisturbed.length
        second = saved[min(1, len(saved) - 1)] if saved else 0
        if fault.is_of_save:
            return Plan(fault.name, 0, second, self.last, undisturbed.saves_files)
        rng = self._random(fault)
        rank = rng.randrange(self.command.ranks - fault.fewer_ranks_first)
        # After the second save there is an older one too, to which a damaged newest one can give way. In the
        # later half a run has finished epochs.
        early = max(length // 2, second + 1)
        step = rng.randint(min(early, length - 1), max(1, length - 1))
        return Plan(fault.name, rank, max(1, step), self.last)

    def _random(self, fault: Fault) -> random.Random:
        return random.Random(f"{self.seed} {fault.name}")

    def _rehearse(self, fault: Fault, plan: Plan, limit_s: float, hang_s: int = 0) -> Rehearsal:
        """The run, and its resume if it has not come to its end. Each has `limit_s`."""
        command, folder, fewer = self.command, self.work / fault.name, fault.fewer_ranks_first
        records, out = folder / "records", folder / "out"
        records.mkdir(parents=True)
        out.mkdir()
        plan.write(records)
        since = time.monotonic()
        first = command.arguments(out, fewer=fewer, hang_s=hang_s)
        run = partial(_run, folder, command.folder(out), limit_s)
        ended = [run("first", first, command.ranks - fewer, fault.send)]
        injected = (records / FIRED).exists()
        if injected and fault.damage:
            damage_newest_save(out, fault.damage, self._random(fault))
        if injected and ended[0].code != DONE:
            again = command.arguments(out, fewer=fault.fewer_ranks_at_resume)
            if not fault.changes_ranks:
                again = command.resume(ended[0].said, again)
            ended.append(run("resume", again))
        return Rehearsal(injected, ended, time.monotonic() - since, read(records))


def _run(
    folder: Path,
    working: Path,
    limit_s: float,
    label: str,
    arguments: list[str],
    ranks: int = 0,
    send: Callable[[int], None] | None = None,
) -> Ended:
    """Run `mpiddp ARGUMENTS` in the folder `working`, for `limit_s` at most; keep what it prints in `folder`.

    When so many ranks hold, `send` gets the pid of the launcher.
    """
    records = folder / "records"
    path = filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")])
    own = {OBSERVER: "mpiddp.drill.observer", DRILL: str(records)}
    said, printed = (folder / f"{label}.{end}" for end in ("err", "out"))
    with (
        printed.open("w", encoding="utf-8") as stdout,
        said.open("w", encoding="utf-8") as stderr,
        subprocess.Popen(
            [sys.executable, "-m", "mpiddp", *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path), **own},
            cwd=working,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,  # a Ctrl-C of the drill's own terminal is the drill's
        ) as process,
    ):
        deadline = time.monotonic() + limit_s
        try:
            while process.poll() is None and time.monotonic() < deadline:
                if send is not None and len([*records.glob("held_*")]) == ranks:
                    send(process.pid)
                    time.sleep(0.2)  # its effects are seen before the ranks go on
                    (records / FIRED).touch()
                    send = None
                time.sleep(_POLL_S)
        finally:
            code = process.poll()
            if code is None:
                _end_leftover(records, wait_s=0.0)
                process.kill()
    text = said.read_text("utf-8", errors="replace")
    return Ended(code, text, _end_leftover(records, _END_S))


def _end_leftover(records: Path, wait_s: float) -> int:
    """Give the processes of the run this time to end. Kill those that remain, and return their number."""
    mark = f"{DRILL}={records}".encode()
    deadline = time.monotonic() + wait_s
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return len(kill_marked(mark))
