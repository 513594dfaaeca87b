"""One rehearsal: the undisturbed run, or one with a fault and its resume, in a folder of its own."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from subprocess import TimeoutExpired
from typing import NamedTuple

from mpiddp.arguments import OURS, OUT
from mpiddp.drill.faults import FIRED, PLAN, UNDISTURBED, Fault, FaultPlan, flip_newest_save
from mpiddp.drill.history import History, read
from mpiddp.errors import DONE
from mpiddp.hosts.processes import child_process, end_all, marked
from mpiddp.launch.run.outcome_file import why_failed
from mpiddp.protocol.variables import DRILL, OBSERVER, REQUEUE

UNDISTURBED_S = 3600.0  # for the undisturbed run
_LEAST_S = 60.0  # for any other command, or four times the time of the undisturbed run
_END_S = 5.0  # after SIGTERM, what a launcher has left may take this time to end
_POLL_S = 0.02
_LONGEST_ERROR = 160  # characters


class Ended(NamedTuple):
    """A command that has ended: its code, None if it took too long, its error, and whether the fault has hit it."""

    code: int | None
    error: str
    was_hit: bool = False


@dataclass(frozen=True)
class Rehearsal:
    """A rehearsal that is over. `ended` has its run and the resume. `injected`: whether the fault has hit."""

    injected: bool
    ended: list[Ended]
    seconds: float
    ranks: list[History]

    @property
    def codes(self) -> tuple[int | None, ...]:
        return tuple(command.code for command in self.ended)

    @property
    def length(self) -> int:
        """The steps at the end."""
        return len(self.ranks[0].steps) - 1 if self.ranks and self.ranks[0].steps else 0

    def saved_steps(self, attempts: slice = slice(None)) -> list[int]:
        """The steps at which any rank has called torch.save, in these attempts."""
        of_ranks = (attempt for rank in self.ranks for attempt in rank.attempts[attempts])
        return sorted({save["step"] for attempt in of_ranks for save in attempt.saves})


@dataclass(frozen=True)
class Drill:
    """Rehearsals of the user's command, each in a new folder below `work`.

    options: of `mpiddp launch`. job: the script, or -m and the module, with its arguments.
    last: the step after which every run ends; 0 if the script ends by itself.
    """

    options: Sequence[str]
    job: Sequence[str]
    ranks: int
    work: Path
    last: int
    seed: int

    @property
    def names_folder(self) -> bool:
        return any(OUT in argument for argument in self.job)

    def has_ranks_for(self, fault: Fault) -> bool:
        return self.ranks > fault.fewer

    def undisturbed(self) -> Rehearsal:
        return self._rehearse(UNDISTURBED, FaultPlan(last=self.last), UNDISTURBED_S)

    def run(self, fault: Fault, undisturbed: Rehearsal) -> Rehearsal:
        """A run with a fault, which hits after the second save, if there is one, and before the end."""
        rng = random.Random(f"{self.seed} {fault.name}")
        saved, length = undisturbed.saved_steps(), undisturbed.length
        # After two saves, a damaged checkpoint can give way to an older one.
        early = max(length // 2, saved[min(1, len(saved) - 1)] + 1 if saved else 0)
        step = max(1, rng.randint(min(early, length - 1), length - 1))
        plan = FaultPlan(True, fault.acts is None, rng.randrange(self.ranks), step, self.last)
        return self._rehearse(fault, plan, max(_LEAST_S, 4 * undisturbed.seconds))

    def _rehearse(self, fault: Fault, plan: FaultPlan, limit_s: float) -> Rehearsal:
        """A run, and its resume if the fault has ended it. Each may take `limit_s`."""
        folder = self.work / fault.name
        records, out = folder / "records", folder / "out"
        records.mkdir(parents=True)
        out.mkdir()
        # Relative paths of a script without {out} must not reach the user's files.
        plan = replace(plan, folder="" if self.names_folder else str(out))
        (records / PLAN).write_text(json.dumps(vars(plan)), encoding="utf-8")
        since = time.monotonic()
        run = partial(self._run, folder, limit_s)
        ended = [run("first", acts=fault.acts)]
        injected = ended[0].was_hit
        if injected and fault.ends and ended[0].code != DONE:
            if fault.flips:
                flip_newest_save(out, random.Random(self.seed))
            ended.append(run("resume", fewer=fault.fewer))
        return Rehearsal(injected, ended, time.monotonic() - since, read(records))

    def _run(
        self,
        folder: Path,
        limit_s: float,
        label: str,
        *,
        acts: Callable[[int], None] | None = None,
        fewer: int = 0,
    ) -> Ended:
        """Run the command for `limit_s` at most, with so many ranks less; keep its output in `folder`.

        `acts`: what to do when the step of the fault has come.
        """
        records, out = folder / "records", folder / "out"
        path = filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")])
        # A stop that the drill requests does not requeue the job in which it runs.
        variables = {OBSERVER: "mpiddp.drill.observer", DRILL: str(records), REQUEUE: ""}
        errors, printed, report = (folder / f"{label}.{end}" for end in ("err", "out", "json"))
        size = ["-n", str(self.ranks - fewer)] if fewer else []
        job = [argument.replace(OUT, str(out)) for argument in self.job]
        command = [
            sys.executable,
            *OURS,
            "launch",
            *self.options,
            *size,
            "--report",
            str(report),
            *job,
        ]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), **variables}
        with (
            printed.open("w", encoding="utf-8") as stdout,
            errors.open("w", encoding="utf-8") as stderr,
            # In its own session, because a Ctrl-C is for the drill alone.
            child_process(command, stdout, stderr, env=env, start_new_session=True) as launcher,
        ):
            deadline, has_acted = time.monotonic() + limit_s, False
            try:
                while launcher.poll() is None and time.monotonic() < deadline:
                    if acts and not has_acted and (records / FIRED).exists():
                        acts(launcher.pid)
                        has_acted = True
                    with suppress(TimeoutExpired):
                        launcher.wait(_POLL_S)
            finally:
                code = launcher.poll()
                left = partial(marked, f"{DRILL}={records}".encode())
                end_all(left, grace_s=0.0 if code is None else _END_S)
        why = why_failed(report, errors.read_text("utf-8", errors="replace"))
        # The job may have ended before the drill has seen that the step has come.
        was_hit = has_acted if acts else (records / FIRED).exists()
        return Ended(code, why[:_LONGEST_ERROR].rstrip("."), was_hit)
