"""One rehearsal: the undisturbed run, or one with a fault and its resume, in a folder of its own."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from mpiddp.drill.faults import FIRED, Fault, FaultPlan, flip_newest_save
from mpiddp.drill.history import Recording, read
from mpiddp.drill.launch_command import LaunchCommand
from mpiddp.errors import DONE
from mpiddp.hosts.processes import descendants, kill_marked, marked, signal_all
from mpiddp.protocol.variables import DRILL, OBSERVER

UNDISTURBED_S = 3600.0  # for the undisturbed run
_LEAST_S = 60.0  # for any other command, or four times as long as the undisturbed one
_END_S = 5.0  # for processes to end after the launcher
_POLL_S = 0.02


class Ended(NamedTuple):
    """A command that has ended: its code, None if it took too long, and its stderr."""

    code: int | None
    said: str


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


@dataclass(frozen=True)
class Drill:
    """Rehearsals of one command, each in a new folder below `work`.

    last: the step that ends every run; 0 for where the script ends.
    """

    command: LaunchCommand
    work: Path
    last: int
    seed: int

    def undisturbed(self) -> Rehearsal:
        return self._rehearse(None, FaultPlan(last=self.last), UNDISTURBED_S)

    def run(self, fault: Fault, undisturbed: Rehearsal) -> Rehearsal:
        """The fault hits after the second save, if there is one, and before the end of the script."""
        rng, recording = self._random(fault), undisturbed.recording
        saved, length = recording.saved_steps(), recording.length
        # A damaged newest checkpoint can give way to an older one. In the later half, a run has ended epochs.
        early = max(length // 2, saved[min(1, len(saved) - 1)] + 1 if saved else 0)
        step = max(1, rng.randint(min(early, length - 1), length - 1))
        plan = FaultPlan(fault.name, rng.randrange(self.command.ranks), step, self.last)
        return self._rehearse(fault, plan, max(_LEAST_S, 4 * undisturbed.seconds))

    def _random(self, fault: Fault) -> random.Random:
        return random.Random(f"{self.seed} {fault.name}")

    def _rehearse(self, fault: Fault | None, plan: FaultPlan, limit_s: float) -> Rehearsal:
        """The run, and its resume if it has not come to its end. Each has `limit_s`."""
        folder = self.work / plan.fault
        records, out = folder / "records", folder / "out"
        records.mkdir(parents=True)
        out.mkdir()
        plan.write(records)
        since = time.monotonic()
        run = partial(_run, folder, self.command.folder(out), limit_s)
        sends = fault is not None and fault.number != signal.SIGKILL
        ended = [run("first", self.command.arguments(out), sends=sends)]
        injected = (records / FIRED).exists()
        if fault is not None and injected and ended[0].code != DONE:
            if fault.flips:
                flip_newest_save(out, self._random(fault))
            ended.append(run("resume", self.command.arguments(out, fewer=fault.fewer)))
        return Rehearsal(injected, ended, time.monotonic() - since, read(records))


def _run(
    folder: Path,
    working: Path,
    limit_s: float,
    label: str,
    arguments: list[str],
    *,
    sends: bool = False,
) -> Ended:
    """Run `mpiddp ARGUMENTS` in the folder `working`, for `limit_s` at most; keep what it prints in `folder`.

    `sends`: when the fault has hit, send SIGTERM to all processes of the job on this host.
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
        ) as launcher,
    ):
        deadline = time.monotonic() + limit_s
        try:
            while launcher.poll() is None and time.monotonic() < deadline:
                if sends and (records / FIRED).exists():
                    sends = False
                    signal_all(
                        lambda: {launcher.pid: "", **descendants(launcher.pid)}, signal.SIGTERM
                    )
                time.sleep(_POLL_S)
        finally:
            code = launcher.poll()
            if code is None:
                _end_leftover(records, wait_s=0.0)
                launcher.kill()
            _end_leftover(records, _END_S)
    return Ended(code, said.read_text("utf-8", errors="replace"))


def _end_leftover(records: Path, wait_s: float) -> None:
    """Give the processes of the run this time to end. Kill those that remain."""
    mark = f"{DRILL}={records}".encode()
    deadline = time.monotonic() + wait_s
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    kill_marked(mark)
