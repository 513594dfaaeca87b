"""What the ranks of an attempt have reported so far, and who is missing or late.

Only the event loop changes it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from mpiddp.errors import STOPPED
from mpiddp.launch.monitor.skew import Pace
from mpiddp.protocol.server import Message
from mpiddp.text import escaped

_NAMED = 4  # ranks in one sentence
EXPLAINS_S = 30.0  # a later end of a command has another reason than its script's error

_FRAME = re.compile(r'^  File "([^"]+)", (.*)(?:\n    (.*))?', re.MULTILINE)


class Announcement(NamedTuple):
    """What the job announces for its restarts, see `mpiddp.runtime.reports.announce`."""

    resume_args: tuple[str, ...] = ()
    global_batch_size: int | None = None
    max_ranks: int | None = None
    run_dir: str = ""


NOTHING_ANNOUNCED = Announcement()


class Ranks:
    """The reports of all ranks. `hosts` has the requested host of each rank."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts = hosts
        self.started: dict[int, dict[str, Any]] = {}
        self.joining: set[int] = set()
        self.in_mpi_init: set[int] = set()
        self.done: dict[int, float] = {}  # ended without an error, and when
        self.exited: set[int] = set()  # of these: without leaving the job
        self.replaced: set[int] = set()  # by another program, which reports nothing
        self.stopped: set[int] = set()  # after their last step, on request
        # Failed or lost, the first message of a rank.
        self.failures: dict[int, Message] = {}
        self.claimed_at: dict[int, float] = {}  # when a rank last began to fail
        self.gone_at: dict[int, float] = {}  # when a rank's connection ended
        self.supports_stop: set[int] = set()
        self.saving: set[int] = set()
        self.last_saved_at = 0.0  # when a rank last ended a save
        self.steps: dict[int, tuple[int, float]] = {}  # and since when
        self.paces: dict[int, Pace] = {}  # of their latest steps
        self.shown: dict[str, Any] = {}  # what rank 0 says of its training
        self.stacks: dict[int, dict[str, Any]] = {}
        self.held: set[int] = set()  # whose agent answers in the place of a script that makes steps
        self.logs: dict[int, str] = {}
        self.error_files: dict[int, str] = {}  # on the rank's host
        self.announcement = NOTHING_ANNOUNCED
        # The reports of scripts within a command, which explain the rank's own report if that follows.
        self.script_failures: dict[int, Message] = {}

    def note(self, message: Message) -> None:
        rank, facts = message.rank, message.facts
        if message.from_script and message.kind in ("done", "failed", "lost"):
            self._note_end_of_script(message)
            return
        if message.kind == "lost":
            self.gone_at[rank] = message.at
        match message.kind:
            case "started":
                self.started[rank] = facts
            case "joining":
                self.joining.add(rank)
            case "mpi_init" if facts["active"]:
                self.in_mpi_init.add(rank)
            case "mpi_init":
                self.in_mpi_init.discard(rank)
            case "supports_stop":
                self.supports_stop.add(rank)
            case "progress":
                if self.steps.get(rank, (-1, 0.0))[0] != facts["step"]:  # it may begin anew
                    self.steps[rank] = (facts["step"], message.at)
                self.paces.setdefault(rank, Pace()).add(message.at, facts)
                if rank == 0:
                    self.shown.update(facts.get("shown", {}))
            case "stacks":
                self.stacks[rank] = facts
                if message.from_script or rank not in self.steps:
                    self.held.discard(rank)
                else:
                    self.held.add(rank)
            case "log":
                self.logs[rank] = facts["path"]
            case "error_file":
                self.error_files[rank] = facts["path"]
            case "announce":
                self.announcement = Announcement(
                    tuple(facts["resume_args"]),
                    facts["global_batch_size"],
                    facts["max_ranks"],
                    self.announcement.run_dir,
                )
            case "run_dir":
                self.announcement = self.announcement._replace(run_dir=facts["path"])
            case "saving":
                self._note_saving(message, is_saving=facts["active"])
            case "stopped":
                self.stopped.add(rank)
                self._note_saving(message, is_saving=True)  # scripts save then, and leave
            case "done" | "exited":
                self.done[rank] = message.at
                # The rank had closed its connection, and has another one.
                if (failure := self.failures.get(rank)) and failure.kind == "lost":
                    del self.failures[rank]
                if message.kind == "exited":
                    self.exited.add(rank)
                self._note_saving(message, is_saving=False)
            case "replaced" if facts["active"]:
                self.replaced.add(rank)
            case "replaced":
                self.replaced.discard(rank)
            case "lost" if rank in self.replaced and not facts["silent"]:
                self.done[rank] = message.at
                self.exited.add(rank)
            case "claim":
                self.claimed_at[rank] = message.at
            case "failed" if facts["code"] == STOPPED and rank in self.stopped:
                self.done[rank] = message.at
                self._note_saving(message, is_saving=False)
            case "failed" | "lost" if rank not in self.done:
                self.failures.setdefault(rank, self._explained(message))
                self._note_saving(message, is_saving=False)

    def _note_end_of_script(self, message: Message) -> None:
        """Only its rank knows whether the command succeeds: it may start the script again."""
        self._note_saving(message, is_saving=False)
        if message.kind == "failed":
            self.script_failures[message.rank] = message
        elif message.kind == "done":
            self.script_failures.pop(message.rank, None)

    def _explained(self, message: Message) -> Message:
        """A rank's report with the reason of its script, if that has failed."""
        reason = self.script_failures.get(message.rank)
        if reason is None or message.kind != "failed" or message.at - reason.at > EXPLAINS_S:
            return message
        return message._replace(facts={**reason.facts, "code": message.facts["code"]}, at=reason.at)

    def _note_saving(self, message: Message, *, is_saving: bool) -> None:
        if is_saving:
            self.saving.add(message.rank)
        elif message.rank in self.saving:
            self.saving.remove(message.rank)
            self.last_saved_at = message.at

    @property
    def world_size(self) -> int:
        return len(self.hosts)

    @property
    def missing(self) -> list[int]:
        """The ranks that have not joined, or for which the others' MPI waits."""
        here = self.joining or self.in_mpi_init
        return [rank for rank in range(self.world_size) if rank not in here]

    @property
    def newest_step_at(self) -> float | None:
        """The time of the newest step of any rank by the server's clock, in seconds."""
        return max((at for _, at in self.steps.values()), default=None)

    @property
    def all_done(self) -> bool:
        return len(self.done) == self.world_size

    @property
    def all_stopped(self) -> bool:
        """Whether the job stopped on request after a save.

        Some ranks may have had less to do than others, and finished before the request.
        """
        return self.all_done and bool(self.stopped)

    @property
    def why_not_resumable(self) -> str:
        """The reason why the job would lose work by a stop; "" if it would lose none."""
        if len(self.supports_stop) < self.world_size:
            return "not every rank has called mpiddp.should_stop()"
        if self.announcement == NOTHING_ANNOUNCED:
            return "the script has announced nothing that resumes it (mpiddp.announce)"
        return ""

    def forget_stacks(self) -> None:
        self.stacks.clear()

    def files_of_lost_ranks(self) -> dict[int, str]:
        """The files into which ranks that vanished may have written their error."""
        lost = [rank for rank, message in self.failures.items() if message.kind == "lost"]
        return {rank: self.error_files[rank] for rank in lost if rank in self.error_files}

    def remove_error_files(self) -> None:
        """Remove the files of @record on this host. Ranks that were killed could not."""
        for path in self.error_files.values():
            with suppress(OSError, ValueError):  # ValueError for a NUL
                Path(path).unlink()

    def silent_hosts(self) -> set[str]:
        """The ones of `hosts` that stopped answering."""
        return {self.hosts[rank] for rank, message in self.failures.items() if is_silent(message)}

    def host_of(self, rank: int) -> str:
        """The rank's own name of its host, once it has reported it; else the requested host."""
        return escaped(str(self.started.get(rank, {}).get("host", self.hosts[rank])))

    def name(self, rank: int) -> str:
        return f"rank {rank} on {self.host_of(rank)}"

    def names(self, ranks: Sequence[int]) -> str:
        """The ranks with their hosts; only the first few of many."""
        shown = ", ".join(map(self.name, ranks[:_NAMED]))
        return shown if len(ranks) <= _NAMED else f"{shown} and {len(ranks) - _NAMED} other ranks"


def is_silent(message: Message) -> bool:
    return message.kind == "lost" and bool(message.facts["silent"])


def late_clause(ranks: Ranks, limit_s: float) -> str:
    """A clause that names the ranks that still save, else those that have not ended, after the time limit."""
    if saving := sorted(ranks.saving):
        are = "was" if len(saving) == 1 else "were"
        return f"{ranks.names(saving)} {are} still saving {limit_s:g} s after the request"
    late = [rank for rank in sorted(ranks.started) if rank not in ranks.done]
    return f"{ranks.names(late)} had not stopped {limit_s:g} s after the request (--grace)"


def missing_sentence(ranks: Ranks, timeout_s: float) -> str:
    """A sentence that names the ranks that did not join, with the last messages of the first of them."""
    missing = ranks.missing
    names = ", ".join(map(ranks.name, missing))
    owner = "Its last words" if len(missing) == 1 else f"The last words of rank {missing[0]}"
    return (
        f"only {ranks.world_size - len(missing)} of {ranks.world_size} ranks joined in {timeout_s:g} s. "
        f"Missing: {names}. {owner}: {_last_line(ranks, missing[0])}"
    )


def _last_line(ranks: Ranks, rank: int) -> str:
    """The line that the rank's Python executes: the innermost one outside of Python's import system."""
    if rank not in ranks.started:
        return "none; its Python has not started."
    if rank in ranks.exited:
        return "none; it has ended, with exit code 0."
    if rank not in ranks.stacks:
        pid = ranks.started[rank]["pid"]
        return (
            f"none; it started (pid {pid}) but does not answer: it is stopped, or stuck in native "
            "code."
        )
    frames = main_frames(ranks.stacks[rank]["text"])
    own = [frame for frame in frames if not frame[0].startswith("<frozen ")]
    if not own:
        return "none; its Python stack shows no line of a script."
    file, line, code = own[-1]
    return f"in {file}, {line}: {code}"


def main_frames(text: str) -> list[tuple[str, str, str]]:
    """The main thread's frames, outermost first: file, "line 3, in work", and that line's code."""
    main = text.rpartition("thread MainThread:\n")[2].partition("\nthread ")[0]
    return frames_of(main)


def frames_of(thread: str) -> list[tuple[str, str, str]]:
    """The frames of a thread's stack, outermost first."""
    return _FRAME.findall(thread)
