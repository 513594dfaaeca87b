"""What the ranks of an attempt have reported so far, and who is missing or late.

Only the event loop changes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mpiddp.errors import STOPPED
from mpiddp.launch.pace import Pace
from mpiddp.protocol.server import Message
from mpiddp.text import escaped

_NAMED = 4  # ranks in one sentence
MPIRUN, MPIRUN_AT_END = -1, -2  # who prints beside the ranks, before and after a job begins to end


class Announcement(NamedTuple):
    """What the job announces for its restarts, see `mpiddp.runtime.reports.announce`.

    `world_size` is that of the attempt that announced the global batch.
    """

    resume_args: tuple[str, ...] = ()
    global_batch_size: int | None = None
    max_ranks: int | None = None
    run_dir: str = ""
    world_size: int = 0

    def after(self, later: Announcement) -> Announcement:
        """This one after a later attempt. The first announcement of each kind counts."""
        known = {name: value for name, value in self._asdict().items() if value}
        if self.global_batch_size is None:
            known["world_size"] = later.world_size
        return later._replace(**known)


NOTHING_ANNOUNCED = Announcement()


class Ranks:
    """The reports of all ranks. `hosts` has the requested host of each rank."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts = hosts
        self.world_size = len(hosts)
        self.started: dict[int, dict[str, Any]] = {}
        self.joining: set[int] = set()
        self.in_mpi_init: set[int] = set()
        self.done: dict[int, float] = {}  # ended without an error, and when
        self.exited: set[int] = set()  # of these: without leaving the job
        self.stopped: set[int] = set()  # after their last step, on request
        self.failures: dict[int, Message] = {}  # failed or lost, the first message of a rank
        self.claimed_at: dict[int, float] = {}  # when a rank last began to fail
        # The reports of scripts within a command, which explain the rank's own report if that follows.
        self.script_failures: dict[int, Message] = {}
        self.supports_stop: set[int] = set()
        self.saving: set[int] = set()
        self.last_saved_at = 0.0  # when a rank last ended a save
        self.steps: dict[int, tuple[int, float]] = {}  # and since when
        self.paces: dict[int, Pace] = {}  # of their latest steps
        self.shown: dict[str, Any] = {}  # what rank 0 says of its training
        self.stacks: dict[int, dict[str, Any]] = {}
        self.held: set[int] = set()  # whose agent answers in the place of a script that makes steps
        self.logs: dict[int, str] = {}
        self.announcement = NOTHING_ANNOUNCED

    def note(self, message: Message) -> None:
        rank, kind, facts, at, is_of_script = message
        # Only the rank knows whether its command succeeds: it may start the script again.
        if is_of_script and kind in ("done", "failed", "lost"):
            self._note_saving(message, is_saving=False)
            if kind == "failed":
                self.script_failures[rank] = message
            elif kind == "done":
                self.script_failures.pop(rank, None)
            return
        is_stop = kind == "failed" and facts["code"] == STOPPED and rank in self.stopped
        if is_stop or kind in ("done", "exited"):
            self.done[rank] = at
            self._note_saving(message, is_saving=False)
        match kind:
            case "started":
                self.started[rank] = facts
            case "joining" | "supports_stop" | "exited":
                getattr(self, kind).add(rank)
            case "mpi_init" if facts["active"]:
                self.in_mpi_init.add(rank)
            case "mpi_init":
                self.in_mpi_init.discard(rank)
            case "progress":
                if self.steps.get(rank, (-1, 0.0))[0] != facts["step"]:  # it may begin anew
                    self.steps[rank] = (facts["step"], at)
                self.paces.setdefault(rank, Pace()).add(at, facts)
                if rank == 0:
                    self.shown.update(facts.get("shown", {}))
            case "stacks":
                self.stacks[rank] = facts
                is_held = not is_of_script and rank in self.steps
                (self.held.add if is_held else self.held.discard)(rank)
            case "log":
                self.logs[rank] = facts["path"]
            case "announce":
                self.announcement = self.announcement._replace(
                    resume_args=tuple(facts["resume_args"]),
                    global_batch_size=facts["global_batch_size"],
                    max_ranks=facts["max_ranks"],
                    world_size=self.world_size,
                )
            case "run_dir":
                self.announcement = self.announcement._replace(run_dir=facts["path"])
            case "saving":
                self._note_saving(message, is_saving=facts["active"])
            case "stopped":
                self.stopped.add(rank)
                self._note_saving(message, is_saving=True)  # scripts save then, and leave
            case "claim":
                self.claimed_at[rank] = at
            case "failed" | "lost" if rank not in self.done:
                reason = self.script_failures.get(rank)
                if reason and kind == "failed":
                    explained = {**reason.facts, "code": facts["code"]}
                    message = message._replace(facts=explained, at=reason.at)
                self.failures.setdefault(rank, message)
                self._note_saving(message, is_saving=False)

    def _note_saving(self, message: Message, *, is_saving: bool) -> None:
        if is_saving:
            self.saving.add(message.rank)
        elif message.rank in self.saving:
            self.saving.remove(message.rank)
            self.last_saved_at = message.at

    @property
    def missing(self) -> list[int]:
        """The ranks that have not joined, or for which the others' MPI waits: all, if it waits in all."""
        here = self.joining or self.in_mpi_init
        left = [rank for rank in range(self.world_size) if rank not in here]
        return left or [rank for rank in range(self.world_size) if rank not in self.joining]

    @property
    def left(self) -> list[int]:
        """The ranks that have not ended without an error."""
        return [rank for rank in range(self.world_size) if rank not in self.done]

    @property
    def newest_step(self) -> int:
        """The newest step of any rank, 0 before the first."""
        return max((step for step, _ in self.steps.values()), default=0)

    @property
    def all_done(self) -> bool:
        return len(self.done) == self.world_size

    @property
    def is_full(self) -> bool:
        """Whether the job can use no more ranks."""
        most = self.announcement.max_ranks
        return most is not None and self.world_size >= most

    @property
    def why_not_resumable(self) -> str:
        """The reason why the job would lose work by a stop; "" if it would lose none."""
        if len(self.supports_stop) < self.world_size:
            return "not every rank has called mpiddp.should_stop()"
        if self.announcement == NOTHING_ANNOUNCED:
            return "the script has announced nothing that resumes it (mpiddp.announce)"
        return ""

    @property
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

    def late_clause(self, limit_s: float) -> str:
        """A clause that names the ranks that still save, else those that have not ended, after the limit."""
        if saving := sorted(self.saving):
            are = "was" if len(saving) == 1 else "were"
            return f"{self.names(saving)} {are} still saving {limit_s:g} s after the request"
        late = [rank for rank in self.left if rank in self.started]
        return f"{self.names(late)} had not stopped {limit_s:g} s after the request (--grace)"


def is_silent(message: Message) -> bool:
    return message.kind == "lost" and bool(message.facts["silent"])
