"""One rehearsal: the undisturbed run, or one with a fault and its resumes, in a folder of its own."""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mpiddp.drill import injectors
from mpiddp.drill.command import Command, program
from mpiddp.drill.faults import Fault
from mpiddp.drill.plan import FIRED, Plan
from mpiddp.drill.records import Recording, read
from mpiddp.errors import BAD_INPUT, DONE
from mpiddp.hosts.pidfd import kill_marked, marked
from mpiddp.protocol.variables import DRILL, OBSERVER

UNDISTURBED_S = 3600.0  # for the undisturbed run
_LEAST_S = 60.0  # for any other command, or four times as long as the undisturbed one
_MOST_RESUMES = 2
_END_S = 5.0  # for processes to end after the launcher
_POLL_S = 0.02
_NOTHING = Fault("none", act="")


@dataclass(frozen=True)
class Rehearsal:
    """What happened. `codes`: of the first command and of each resume; None for one that took too long.

    injected: whether the fault has hit. leftover: processes of this host that still ran after a command had
    ended.
    """

    injected: bool
    codes: list[int | None]
    said: list[str]  # by each command on stderr
    leftover: int
    seconds: float
    recording: Recording


@dataclass(frozen=True)
class Drill:
    """Runs rehearsals of one command, each in a new folder below `work`.

    last: the step that ends every run; 0 for where the script ends.
    """

    command: Command
    work: Path
    last: int
    seed: int

    def undisturbed(self) -> Rehearsal:
        return self._rehearse(_NOTHING, Plan(last=self.last), UNDISTURBED_S, 0)

    def run(self, fault: Fault, undisturbed: Rehearsal) -> Rehearsal:
        rng = random.Random(f"{self.seed} {fault.name}")
        limit_s = max(_LEAST_S, 4 * undisturbed.seconds)
        hang_s = 5 + round(20 * undisturbed.recording.longest_step_s) if fault.act == "hang" else 0
        return self._rehearse(fault, self._plan(fault, undisturbed.recording, rng), limit_s, hang_s)

    def _plan(self, fault: Fault, undisturbed: Recording, rng: random.Random) -> Plan:
        """When the fault hits: after the first save, if the undisturbed run has saved, and before its end."""
        saved, length, ahead = undisturbed.saved_steps, undisturbed.length, undisturbed.ahead
        second = saved[min(1, len(saved) - 1)] if saved else 0
        if fault.is_of_save:
            return Plan(fault.act, 0, second, self.last, undisturbed.saves_files, ahead)
        rank = rng.randrange(self.command.ranks - fault.fewer_ranks_first)
        # After the second save there is an older one too, to which a damaged newest one can give way. In the
        # later half a run has finished epochs.
        early = max(length // 2, second + 1)
        step = rng.randint(min(early, length - 1), max(1, length - 1))
        return Plan(fault.act, rank, max(1, step), self.last, ahead=ahead)

    def _rehearse(self, fault: Fault, planned: Plan, limit_s: float, hang_s: int) -> Rehearsal:
        """The run, and its resumes if it has not come to its end."""
        name = fault.name if fault.act else "undisturbed"
        records, out = self.work / name / "records", self.work / name / "out"
        records.mkdir(parents=True)
        out.mkdir()
        planned.write(records)
        fewer = (fault.fewer_ranks_first, fault.fewer_ranks_at_resume)
        command, ranks = self.command, self.command.ranks - fewer[0]
        run = _Run(command, records, out, limit_s)
        since = time.monotonic()
        first = command.arguments(out, fewer=fewer[0], hang_s=hang_s)
        again = command.arguments(out, fewer=fewer[1])
        codes, said = [run.run(first, "first", ranks, fault.send)], [run.said("first")]
        leftover = run.end_leftover()
        injected = (records / FIRED).exists()
        if injected and fault.damage:
            rng = random.Random(f"{self.seed} {fault.name}")
            injectors.damage_newest_save(out, fault.damage, rng)
        while injected and len(codes) <= _MOST_RESUMES and _goes_on(codes):
            same = again if fault.changes_ranks else command.resume(said[-1], again)
            label = f"resume_{len(codes)}"
            codes.append(run.run(same, label, 0, None))
            said.append(run.said(label))
            leftover += run.end_leftover()
        seconds = time.monotonic() - since
        return Rehearsal(injected, codes, said, leftover, seconds, read(records))


def _goes_on(codes: list[int | None]) -> bool:
    """Whether another resume can help: the first always, a further one only after a stop on request."""
    return (codes[-1] != DONE) if len(codes) == 1 else codes[-1] not in (DONE, None, 1, BAD_INPUT)


@dataclass(frozen=True)
class _Run:
    """The commands of one rehearsal."""

    command: Command
    records: Path
    out: Path
    limit_s: float  # for one command

    def run(
        self, arguments: list[str], label: str, ranks: int, send: Callable[[int], None] | None
    ) -> int | None:
        """Run `mpiddp ARGUMENTS` to its end, and return its exit code; None if it took too long."""
        path = [str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            OBSERVER: "mpiddp.drill.observer",
            DRILL: str(self.records),
        }
        folder = self.records.parent
        with (
            (folder / f"{label}.out").open("w") as stdout,
            (folder / f"{label}.err").open("w") as stderr,
            subprocess.Popen(
                program(arguments),
                env=env,
                cwd=self.command.folder(self.out),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,  # a Ctrl-C of the drill's own terminal is the drill's
            ) as process,
        ):
            deadline = time.monotonic() + self.limit_s
            try:
                while process.poll() is None and time.monotonic() < deadline:
                    if send is not None and self._all_hold(ranks):
                        send(process.pid)
                        time.sleep(0.2)  # its effects are seen before the ranks go on
                        (self.records / FIRED).touch()
                        send = None
                    time.sleep(_POLL_S)
            finally:
                ended = process.poll() is not None
                if not ended:
                    self.end_leftover(wait_s=0.0)
                    process.kill()
        return process.returncode if ended else None

    def _all_hold(self, ranks: int) -> bool:
        return all((self.records / f"held_{rank}").exists() for rank in range(ranks))

    def said(self, label: str) -> str:
        return (self.records.parent / f"{label}.err").read_text(errors="replace")

    def end_leftover(self, wait_s: float = _END_S) -> int:
        """Give the processes of the run this time to end. Kill those that remain, and return their number."""
        mark = f"{DRILL}={self.records}".encode()
        deadline = time.monotonic() + wait_s
        while marked(mark) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return len(kill_marked(mark))
