"""One rehearsal: the undisturbed run, or one with a fault and its resumes, in a folder of its own."""

from __future__ import annotations

import contextlib
import random
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mpiddp.drill import injectors
from mpiddp.drill.command import Command, program
from mpiddp.drill.faults import Fault
from mpiddp.drill.injectors import Plan
from mpiddp.drill.records import Recording, read
from mpiddp.errors import BAD_INPUT, DONE
from mpiddp.hosts.pidfd import has, kill_marked
from mpiddp.protocol.variables import DRILL, OBSERVER

_MOST_RESUMES = 2
_END_S = 5.0  # for processes to end after the launcher
_POLL_S = 0.02


@dataclass(frozen=True)
class Rehearsal:
    """What happened. `codes`: of the first command and of each resume; None for one that was ended.

    left: processes of this host that still ran after a command had ended. files: of the run, at the end.
    """

    fired: bool
    step: int  # of the fault
    codes: list[int | None]
    said: list[str]  # by each command on stderr
    left: int
    files: set[str]
    seconds: float
    recording: Recording


class Stage:
    """Runs rehearsals of one command, each in a new folder below `work`."""

    def __init__(self, command: Command, work: Path, last: int, deadline: float) -> None:
        self.command, self.work, self.last = command, work, last
        self._deadline = deadline  # time.monotonic()
        self._rng = random.Random(0)

    def undisturbed(self, name: str) -> Rehearsal:
        return self._rehearse(name, None, Plan(last=self.last), limit_s=None)

    def disturbed(self, fault: Fault, reference: Rehearsal, seed: int) -> Rehearsal:
        self._rng = random.Random(f"{seed} {fault.name}")
        plan = self._plan(fault, reference.recording)
        limit_s = 3 * reference.seconds + 60
        return self._rehearse(fault.name, fault, plan, limit_s, reference)

    def _plan(self, fault: Fault, reference: Recording) -> Plan:
        """When the fault hits: after the first save, if the undisturbed run has saved, and before its end."""
        saved, length = reference.saved_steps, reference.length
        rank = self._rng.randrange(self.command.ranks - fault.before)
        if fault.act.endswith("in save"):
            savers = [save["step"] for save in reference.saves]
            step = saved[min(1, len(saved) - 1)] if savers else 0
            return Plan(fault.act, 0, step, self.last)
        # After the second save there is an older one too, to which a damaged newest one can give way. In the
        # later half a run has finished epochs.
        early = max(length // 2, saved[min(1, len(saved) - 1)] + 1 if saved else 1)
        step = self._rng.randint(min(early, length - 1), max(1, length - 1))
        return Plan(fault.act, rank, max(1, step), self.last)

    def _rehearse(
        self,
        name: str,
        fault: Fault | None,
        plan: Plan,
        limit_s: float | None,
        reference: Rehearsal | None = None,
    ) -> Rehearsal:
        folder = self.work / name
        records, out = folder / "records", folder / "out"
        records.mkdir(parents=True)
        out.mkdir()
        plan.write(records)
        ranks, hang_s = self.command.ranks, 0
        if fault is not None and fault.act == "hang" and reference is not None:
            hang_s = 5 + round(20 * reference.recording.longest_step_s)
        before = ranks - (fault.before if fault else 0)
        first = self.command.arguments(out, before, hang_s)
        again = self.command.arguments(out, ranks - (fault.after if fault else 0))
        run = _Runner(self.command, records, out, min(limit_s or 1e9, self.seconds_left))
        since = time.monotonic()
        send = fault.send if fault else None
        codes, said = [run.run(first, "first", before, send)], [run.said("first")]
        left = run.end_left()
        fired = injectors.has_fired(records)
        if fired and fault and fault.harm and (newest := injectors.newest_save(out)):
            injectors.damage(newest, fault.harm, self._rng)
        injectors.may_go_on(records)
        while fired and len(codes) <= _MOST_RESUMES and _goes_on(codes):
            printed = said[-1]
            same = again if fault and fault.changes_ranks else self.command.resume(printed, again)
            label = f"resume_{len(codes)}"
            codes.append(run.run(same, label, 0, None))
            said.append(run.said(label))
            left += run.end_left()
        seconds = time.monotonic() - since
        files = {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()}
        return Rehearsal(fired, plan.step, codes, said, left, files, seconds, read(records))

    @property
    def seconds_left(self) -> float:
        return max(1.0, self._deadline - time.monotonic())


def _goes_on(codes: list[int | None]) -> bool:
    """Whether another resume can help: the first always, a further one only after a stop on request."""
    return (codes[-1] != DONE) if len(codes) == 1 else codes[-1] not in (DONE, None, 1, BAD_INPUT)


@dataclass(frozen=True)
class _Runner:
    command: Command
    records: Path
    out: Path
    limit_s: float  # for one command

    def run(
        self, arguments: list[str], label: str, ranks: int, send: Callable[[int], None] | None
    ) -> int | None:
        """Run `mpiddp ARGUMENTS` to its end, and return its exit code; None if it took too long."""
        env = self.command.environment() | {
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
            sent = send is None
            try:
                while process.poll() is None and time.monotonic() < deadline:
                    if send is not None and not sent:
                        sent = injectors.send_when_held(self.records, ranks, process.pid, send)
                    time.sleep(_POLL_S)
            finally:
                ended = process.poll() is not None
                if not ended:
                    self.end_left(wait_s=0.0)
                    process.kill()
        return process.returncode if ended else None

    def said(self, label: str) -> str:
        return (self.records.parent / f"{label}.err").read_text(errors="replace")

    def end_left(self, wait_s: float = _END_S) -> int:
        """Give the processes of the run this time to end. Kill those that remain, and return their number."""
        mark = f"{DRILL}={self.records}".encode()
        deadline = time.monotonic() + wait_s
        while _runs(mark) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return len(kill_marked(mark))


def _runs(mark: bytes) -> bool:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if has(int(entry.name), mark):
                    return True
    return False
