"""One rehearsal: the undisturbed run, or one with a fault and its resumes, in a folder of its own."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from mpiddp.drill import injectors, plan
from mpiddp.drill.command import Command, program
from mpiddp.drill.disk import Disk, small_disk
from mpiddp.drill.faults import Fault
from mpiddp.drill.plan import Plan
from mpiddp.drill.records import Recording, read
from mpiddp.errors import BAD_INPUT, DONE
from mpiddp.hosts.pidfd import kill_marked, marked
from mpiddp.protocol.variables import DRILL, OBSERVER

_MOST_RESUMES = 2
_END_S = 5.0  # for processes to end after the launcher
_POLL_S = 0.02
_DISK_MARGIN = 8 << 20  # beside twice what the undisturbed run has left: a save in the making, logs
_NOTHING = Fault("none", act="")


@dataclass(frozen=True)
class Rehearsal:
    """What happened. `codes`: of the first command and of each resume; None for one that was ended.

    fired: whether the fault has hit. note: why it has not, or how it was made.
    left: processes of this host that still ran after a command had ended. files: of the run, at the end,
        with their sizes in bytes.
    """

    fired: bool
    note: str
    codes: list[int | None]
    said: list[str]  # by each command on stderr
    left: int
    files: dict[str, int]
    seconds: float
    recording: Recording


@dataclass(frozen=True)
class Stage:
    """Runs rehearsals of one command, each in a new folder below `work`.

    last: the step that ends every run; 0 for where the script ends.
    """

    command: Command
    work: Path
    last: int
    seed: int

    def undisturbed(self, name: str, limit_s: float) -> Rehearsal:
        """`limit_s` is the time of a command."""
        return self._rehearse(name, _NOTHING, Plan(last=self.last), limit_s, None)

    def disturbed(self, fault: Fault, reference: Rehearsal, limit_s: float) -> Rehearsal:
        rng = random.Random(f"{self.seed} {fault.name}")
        return self._rehearse(
            fault.name, fault, self._plan(fault, reference.recording, rng), limit_s, reference
        )

    def _plan(self, fault: Fault, reference: Recording, rng: random.Random) -> Plan:
        """When the fault hits: after the first save, if the undisturbed run has saved, and before its end."""
        saved, length = reference.saved_steps, reference.length
        if fault.is_of_save:
            step = saved[min(1, len(saved) - 1)]
            return Plan(fault.act, 0, step, self.last, in_files=reference.saves_files)
        ranks, _ = self._size(fault, fault.before)
        rank = rng.randrange(ranks)
        if fault.act == "link":
            rank = rng.choice(reference.ranks_beside(socket.gethostname()))
        # After the second save there is an older one too, to which a damaged newest one can give way. In the
        # later half a run has finished epochs.
        early = max(length // 2, saved[min(1, len(saved) - 1)] + 1 if saved else 1)
        step = rng.randint(min(early, length - 1), max(1, length - 1))
        return Plan(fault.act, rank, max(1, step), self.last)

    def _size(self, fault: Fault, fewer: int) -> tuple[int, list[str]]:
        ranks, hosts = (0, fewer) if fault.of_hosts else (fewer, 0)
        return self.command.size.fewer(ranks, hosts)

    def _rehearse(
        self, name: str, fault: Fault, planned: Plan, limit_s: float, reference: Rehearsal | None
    ) -> Rehearsal:
        folder = self.work / name
        records, out = folder / "records", folder / "out"
        records.mkdir(parents=True)
        out.mkdir()
        hang_s, note = 0, ""
        if fault.act == "hang" and reference is not None:
            hang_s = 5 + round(20 * reference.recording.longest_step_s)
        with ExitStack() as stack:
            disk = None
            if fault.act == "full in save" and reference is not None:
                try:
                    size = _size_of_disk(reference, self.work)
                    disk = stack.enter_context(small_disk(out, size))
                    planned = replace(planned, disk=str(out))
                except OSError as error:
                    note = f"torch.save raised the error, as the disk could not be filled: {error}"
            planned.write(records)
            run = _Runner(self.command, records, out, limit_s, disk)
            found = self._run(run, fault, planned, hang_s)
        return replace(found, note=plan.refusal(records) or note)

    def _run(self, run: _Runner, fault: Fault, planned: Plan, hang_s: int) -> Rehearsal:
        """The run, and its resumes if it has not come to its end."""
        ranks, size = self._size(fault, fault.before)
        first = self.command.arguments(run.out, size, hang_s)
        again = self.command.arguments(run.out, self._size(fault, fault.after)[1])
        since = time.monotonic()
        codes, said = [run.run(first, "first", ranks, fault.send)], [run.said("first")]
        left = run.end_left()
        fired = plan.has_fired(run.records)
        if fired and fault.harm and (newest := injectors.newest_save(run.seen)):
            injectors.damage(newest, fault.harm, random.Random(f"{self.seed} {fault.name}"))
        plan.may_go_on(run.records, planned, run.seen)
        while fired and len(codes) <= _MOST_RESUMES and _goes_on(codes):
            same = again if fault.changes_ranks else self.command.resume(said[-1], again)
            label = f"resume_{len(codes)}"
            codes.append(run.run(same, label, 0, None))
            said.append(run.said(label))
            left += run.end_left()
        seconds = time.monotonic() - since
        files = [file for file in run.seen.rglob("*") if file.is_file()]
        sizes = {str(file.relative_to(run.seen)): file.stat().st_size for file in files}
        return Rehearsal(fired, "", codes, said, left, sizes, seconds, read(run.records))


def _size_of_disk(reference: Rehearsal, work: Path) -> int:
    """The bytes of a disk for such a run.

    Raises:
        OSError: it would not help, or take too much memory.
    """
    host = reference.recording.ranks[0].attempts[0].host
    if host != socket.gethostname():
        raise OSError(f"rank 0 is on {host}")
    paths = [save["path"] for save in reference.recording.saves if save["path"]]
    if outside := [path for path in paths if not Path(path).is_relative_to(work.resolve())]:
        raise OSError(f"the script saves into {outside[0]}")
    size = 2 * sum(reference.files.values()) + _DISK_MARGIN
    if size > os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2:
        raise OSError(f"it would take {size >> 20} MiB of memory")
    return size


def _goes_on(codes: list[int | None]) -> bool:
    """Whether another resume can help: the first always, a further one only after a stop on request."""
    return (codes[-1] != DONE) if len(codes) == 1 else codes[-1] not in (DONE, None, 1, BAD_INPUT)


@dataclass(frozen=True)
class _Runner:
    command: Command
    records: Path
    out: Path
    limit_s: float  # for one command
    disk: Disk | None  # at `out`

    @property
    def seen(self) -> Path:
        """The path of `out` for this process."""
        return self.disk.seen() if self.disk else self.out

    def run(
        self, arguments: list[str], label: str, ranks: int, send: Callable[[int], None] | None
    ) -> int | None:
        """Run `mpiddp ARGUMENTS` to its end, and return its exit code; None if it took too long."""
        env = self.command.environment() | {
            OBSERVER: "mpiddp.drill.observer",
            DRILL: str(self.records),
        }
        folder, cwd = self.records.parent, self.command.folder(self.out)
        started = program(arguments)
        with (
            (folder / f"{label}.out").open("w") as stdout,
            (folder / f"{label}.err").open("w") as stderr,
            subprocess.Popen(
                self.disk.enter(started, cwd) if self.disk else started,
                env=env,
                cwd=cwd,
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
                        sent = plan.send_when_held(self.records, ranks, process.pid, send)
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
        while marked(mark) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return len(kill_marked(mark))
