"""The ranks' messages so far, and the verdict that follows from them, independent of mpirun's exit code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mpiddp.launch.supervise.control_server import Message
from mpiddp.protocol.messages import recorded_error
from mpiddp.text import escaped

# Errors that a rank reports when another rank has ended. If that is the cause, the launcher notices the
# other's end at about the same time.
_CONSEQUENCE = re.compile(r"connection|by peer|broken pipe|gloo|nccl|store|socket", re.IGNORECASE)
_CONSEQUENCE_S = 0.3
# The others' messages may overtake the message of the rank that failed first according to the store.
_FIRST_S = 5.0
_SILENCE_S = 15.0  # until the kernel reports that a host stopped answering
_NAMED = 4  # ranks in one sentence
_EXPLAINS_S = 30.0  # a later end of a command has another reason than its script's error
_AT_ONCE_S = 0.1  # a rank that ends without a signal does not end others this soon


@dataclass(frozen=True)
class Announcement:
    """What the job announces for its restarts, see `mpiddp.runtime.launcher.announcement.announce`."""

    resume_args: tuple[str, ...] = ()
    global_batch_size: int | None = None
    max_ranks: int | None = None
    run_dir: str = ""


NOTHING_ANNOUNCED = Announcement()


@dataclass
class JobState:
    """The state of a job's ranks. `hosts` has the requested host of each rank."""

    hosts: Sequence[str]
    started: dict[int, dict[str, Any]] = field(default_factory=dict)
    joining: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    stopped: dict[int, dict[str, Any]] = field(default_factory=dict)
    failures: dict[int, Message] = field(
        default_factory=dict
    )  # failed or lost, the first of a rank
    supports_stop: set[int] = field(default_factory=set)
    saving: set[int] = field(default_factory=set)
    last_saved_at: float = 0.0  # when a rank last ended a save
    steps: dict[int, tuple[int, float]] = field(default_factory=dict)  # and since when
    stacks: dict[int, dict[str, Any]] = field(default_factory=dict)
    frames: dict[int, str] = field(default_factory=dict)  # stacks out of native code
    logs: dict[int, str] = field(default_factory=dict)
    error_files: dict[int, str] = field(default_factory=dict)  # on the rank's host
    announcement: Announcement = NOTHING_ANNOUNCED
    # The reports of scripts within a command, which explain the rank's own report if that follows.
    script_failures: dict[int, Message] = field(default_factory=dict)

    def note(self, message: Message) -> None:
        rank, facts = message.rank, message.facts
        if message.from_script and message.kind in ("done", "failed", "lost"):
            self._note_end_of_script(message)
            return
        match message.kind:
            case "started":
                self.started[rank] = facts
            case "joining":
                self.joining.add(rank)
            case "supports_stop":
                self.supports_stop.add(rank)
            case "progress":
                if self.steps.get(rank, (-1, 0.0))[0] < facts["step"]:
                    self.steps[rank] = (facts["step"], message.at)
            case "stacks":
                self.stacks[rank] = facts
            case "frames":
                self.frames[rank] = f"{self.frames.get(rank, '')}{facts['text']}\n"
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
                self.announcement = replace(self.announcement, run_dir=facts["path"])
            case "saving":
                self._note_saving(message, is_saving=facts["active"])
            case "stopped":
                self.stopped[rank] = facts
                self._note_saving(message, is_saving=True)  # scripts save then, and leave
            case "done":
                self.done.add(rank)
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
        if reason is None or message.kind != "failed" or message.at - reason.at > _EXPLAINS_S:
            return message
        return replace(message, facts={**reason.facts, "code": message.facts["code"]}, at=reason.at)

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
        """The ranks that have not joined."""
        return [rank for rank in range(self.world_size) if rank not in self.joining]

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

    def first_failure(self) -> Message | None:
        """The failure that caused the others.

        A rank that vanished takes precedence over the broken connections of its peers, and a silent host
        stopped answering long before it was noticed. A script that has failed may still be ending while the
        others' commands have ended because of it.
        """
        first = min(self.failures.values(), key=_began, default=None)
        if first is None:
            return None
        scripts = [each for rank, each in self.script_failures.items() if rank not in self.done]
        causes = [each for each in scripts if 0 <= first.at - each.at <= _EXPLAINS_S]
        return min([first, *causes], key=_began)

    def remove_error_files(self) -> None:
        """Remove the files of @record on this host. Ranks that were killed could not."""
        for path in self.error_files.values():
            with suppress(OSError, ValueError):  # ValueError for a NUL
                Path(path).unlink()

    def silent_hosts(self) -> set[str]:
        """The ones of `hosts` that stopped answering."""
        return {self.hosts[rank] for rank, message in self.failures.items() if _is_silent(message)}

    def host_of(self, rank: int) -> str:
        """The rank's own name of its host, once it has reported it; else the requested host."""
        return escaped(str(self.started.get(rank, {}).get("host", self.hosts[rank])))

    def name(self, rank: int) -> str:
        return f"rank {rank} on {self.host_of(rank)}"

    def names(self, ranks: Sequence[int]) -> str:
        """The ranks with their hosts; only the first few of many."""
        shown = ", ".join(map(self.name, ranks[:_NAMED]))
        return shown if len(ranks) <= _NAMED else f"{shown} and {len(ranks) - _NAMED} other ranks"

    def sentence(self, first: Message, killed_by: str | None = None) -> str:
        """The verdict: the rank that failed first, why, and where its traceback is.

        Args:
            killed_by: the signal by which a rank ended according to mpirun, "" if there was none, None
                if mpirun does not report it.
        """
        others = " The other ranks were stopped." if self.world_size > 1 else ""
        if first.kind == "lost" and first.facts["silent"]:
            host = self.host_of(first.rank)
            ranks = [r for r, message in self.failures.items() if _is_silent(message)]
            there = sorted(r for r in ranks if self.host_of(r) == host)
            names = f"rank{'s' if len(there) > 1 else ''} {', '.join(map(str, there))}"
            return f"lost {host} ({names}): the host stopped answering.{others}"
        recorded = recorded_error(self.error_files.get(first.rank, ""))
        if first.kind == "lost" and recorded:
            return f"{self.name(first.rank)} failed first: {_first_line(recorded)}.{others}"
        if first.kind == "lost" and killed_by:
            return f"{self.name(first.rank)} was killed by {killed_by}.{others}"
        if killed_by == "" and first.kind == "lost" and len(lost := self._lost_with(first)) > 1:
            return (
                f"the ranks on {', '.join(lost)} ended at the same moment without an error, as when "
                "the MPI daemon on one of these hosts is killed."
            )
        if first.kind == "lost":
            return (
                f"{self.name(first.rank)} ended first, without an error: it was killed, crashed in "
                f"native code, or called os._exit.{others}"
            )
        error, log = first.facts["error"], self.logs.get(first.rank)
        if first.facts["is_verdict"]:
            return f"{error}{others}"
        if not first.facts["traceback"]:
            messages = f": {error}" if error else ""
            code = first.facts["code"]
            return f"{self.name(first.rank)} ended first, with exit code {code}{messages}.{others}"
        where = f" (its traceback: {escaped(log)})" if log else ""
        return f"{self.name(first.rank)} failed first: {_first_line(error)}{where}.{others}"

    def unprinted_error(self, refusal: Message) -> str:
        """The error of a rank that refused, "" if `errors.print_from_one_rank` has printed it on a rank."""
        refused = (rank for rank, message in self.failures.items() if message.kind == "failed")
        if any(self.hosts.index(self.hosts[rank]) == rank for rank in refused):
            return ""
        return str(refusal.facts["error"])

    def _lost_with(self, first: Message) -> list[str]:
        """The hosts of the ranks that vanished together with `first`, in the order of their ranks."""
        ranks = [
            rank
            for rank, message in sorted(self.failures.items())
            if message.kind == "lost" and message.at - first.at < _AT_ONCE_S
        ]
        return list(dict.fromkeys(self.host_of(rank) for rank in ranks))


def _first_line(error: str) -> str:
    return error.strip().partition("\n")[0].rstrip(".")


def _is_silent(message: Message) -> bool:
    return message.kind == "lost" and bool(message.facts["silent"])


def _began(message: Message) -> float:
    """The estimated time when this rank's failure began."""
    if message.kind == "lost":
        return message.at - (_SILENCE_S if message.facts["silent"] else 0.0)
    if message.facts["traceback"] and _CONSEQUENCE.search(message.facts["error"]):
        return message.at + _CONSEQUENCE_S
    return message.at - (_FIRST_S if message.facts["first"] else 0.0)
