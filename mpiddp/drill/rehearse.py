"""One rehearsal: the undisturbed run, or one with a fault and its resume, in a folder of its own."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mpiddp.drill.command import Command
from mpiddp.drill.faults import Fault, damage_newest_save
from mpiddp.drill.plan import FIRED, Plan
from mpiddp.drill.records import Recording, read
from mpiddp.errors import DONE
from mpiddp.hosts.processes import kill_marked, marked
from mpiddp.protocol.variables import DRILL, OBSERVER

UNDISTURBED_S = 3600.0  # for the undisturbed run
_LEAST_S = 60.0  # for any other command, or four times as long as the undisturbed one
_END_S = 5.0  # for processes to end after the launcher
_POLL_S = 0.02
_NOTHING = Fault("undisturbed", act="")


@dataclass(frozen=True)
class Rehearsal:
    """What happened. `codes`: of the first command and of the resume; None for one that took too long.

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
        limit_s = max(_LEAST_S, 4 * undisturbed.seconds)
        hang_s = 5 + round(undisturbed.seconds) if fault.act == "hang" else 0
        return self._rehearse(fault, self._plan(fault, undisturbed.recording), limit_s, hang_s)

    def _plan(self, fault: Fault, undisturbed: Recording) -> Plan:
        """When the fault hits: after the first save, if the undisturbed run has saved, and before its end."""
        saved, length, ahead = undisturbed.saved_steps, undisturbed.length, undisturbed.ahead
        second = saved[min(1, len(saved) - 1)] if saved else 0
        if fault.is_of_save:
            return Plan(fault.act, 0, second, self.last, undisturbed.saves_files, ahead)
        rng = self._random(fault)
        rank = rng.randrange(self.command.ranks - fault.fewer_ranks_first)
        # After the second save there is an older one too, to which a damaged newest one can give way. In the
        # later half a run has finished epochs.
        early = max(length // 2, second + 1)
        step = rng.randint(min(early, length - 1), max(1, length - 1))
        return Plan(fault.act, rank, max(1, step), self.last, ahead=ahead)

    def _random(self, fault: Fault) -> random.Random:
        return random.Random(f"{self.seed} {fault.name}")

    def _rehearse(self, fault: Fault, planned: Plan, limit_s: float, hang_s: int) -> Rehearsal:
        """The run, and its resume if it has not come to its end."""
        command, folder = self.command, self.work / fault.name
        records, out = folder / "records", folder / "out"
        records.mkdir(parents=True)
        out.mkdir()
        planned.write(records)
        since = time.monotonic()
        run = _Run(records, command.folder(out), limit_s)
        fewer = fault.fewer_ranks_first
        first = command.arguments(out, fewer=fewer, hang_s=hang_s)
        ended = [run.run(first, "first", command.ranks - fewer, fault.send)]
        injected = (records / FIRED).exists()
        if injected and fault.damage:
            damage_newest_save(out, fault.damage, self._random(fault))
        if injected and ended[0].code != DONE:
            again = command.arguments(out, fewer=fault.fewer_ranks_at_resume)
            if not fault.changes_ranks:
                again = command.resume(ended[0].said, again)
            ended.append(run.run(again, "resume"))
        return Rehearsal(
            injected,
            [each.code for each in ended],
            [each.said for each in ended],
            sum(each.leftover for each in ended),
            time.monotonic() - since,
            read(records),
        )


@dataclass(frozen=True)
class _Ended:
    """A command that has ended: its code, its stderr, and the number of its processes that still ran."""

    code: int | None
    said: str
    leftover: int


@dataclass(frozen=True)
class _Run:
    """Runs the commands of one rehearsal, in the working folder `out`, each for `limit_s` at most."""

    records: Path
    out: Path
    limit_s: float

    def run(
        self,
        arguments: list[str],
        label: str,
        ranks: int = 0,
        send: Callable[[int], None] | None = None,
    ) -> _Ended:
        """Run `mpiddp ARGUMENTS`. When so many ranks hold, `send` gets the pid of the launcher."""
        path = [str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            OBSERVER: "mpiddp.drill.observer",
            DRILL: str(self.records),
        }
        said, printed = (self.records.parent / f"{label}.{end}" for end in ("err", "out"))
        with (
            printed.open("w") as stdout,
            said.open("w") as stderr,
            subprocess.Popen(
                [sys.executable, "-m", "mpiddp", *arguments],
                env=env,
                cwd=self.out,
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
                code = process.poll()
                if code is None:
                    self._end_leftover(wait_s=0.0)
                    process.kill()
        return _Ended(code, said.read_text(errors="replace"), self._end_leftover(_END_S))

    def _all_hold(self, ranks: int) -> bool:
        return all((self.records / f"held_{rank}").exists() for rank in range(ranks))

    def _end_leftover(self, wait_s: float) -> int:
        """Give the processes of the run this time to end. Kill those that remain, and return their number."""
        mark = f"{DRILL}={self.records}".encode()
        deadline = time.monotonic() + wait_s
        while marked(mark) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return len(kill_marked(mark))
