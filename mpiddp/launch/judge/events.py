"""The record of one attempt: the messages of its ranks and the acts of the launcher, in order, with times.

Every judgement is a function of this record: the phase, the verdict, a hang, stragglers, the status. So a
failure in the field can be judged again from attempt_1.jsonl in --log-dir, which has a line for each event.
In memory, the record keeps the latest event of each kind and rank, and sums of the events before. An Outcome
says how the attempt, or the job, has ended.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

from mpiddp.errors import STOPPED
from mpiddp.launch.judge.calls import Group, RankCalls, Wait, calls_of, find_wait
from mpiddp.launch.judge.gpu_use import GpuUse
from mpiddp.launch.judge.pace import Pace
from mpiddp.protocol.server import LAUNCHER, Event
from mpiddp.text import escaped, signal_name

MPIRUN, MPIRUN_AT_END = -1, -2  # mpirun's own output, until all ranks have joined, and after that
_NAMED = 4  # ranks in one sentence
_CLOCKS = 6  # messages of a rank by which its clock is read

ENDS = frozenset(["done", "exited", "failed", "lost"])
# The messages of ranks (`mpiddp.protocol.channel.MESSAGES`), and the ends of their connections. "started" is the
# agent, and "joining" the Python of its script; `Record.runs` says that all are.
OF_RANKS = ENDS | {
    *("started", "joining", "log", "announce", "run_dir", "saved", "not_saved", "supports_stop"),
    *("progress", "saving", "stopped", "stacks", "calls", "gpus", "claim", "held"),
    *("forming", "shadows", "wrote"),
}
# The acts of the launcher, and the facts of each.
OF_LAUNCHER: dict[str, tuple[str, ...]] = {
    # `here` are the ranks on mpirun's own host.
    "began": ("hosts", "here", "attempt", "hang_timeout_s"),
    "asked": (),  # all ranks, for their stacks
    # A watcher has seen something, of which it has the facts. No judgement reads this.
    "noticed": ("by",),
    # A stop is requested; `by` is a name of `Stop`, and `hang` a sentence if the job hung at that moment.
    "stop": ("by", "reason", "signal", "hang"),
    "kill": (),  # the user has requested a stop again, so the ranks do not save
    "grace": (),  # from now on, the ranks have limited time to stop
    # The launcher ends the ranks: a rank has failed, or for the reason `why`, or because the ranks that the
    # clause `overdue` names have not stopped in time.
    "end": ("failed", "why", "overdue"),
    "preempted": (),  # Slurm has told the job to leave its nodes, which may have ended the ranks
    "hold": (),  # the scripts are ended, and their agents wait for the next attempt
    "mpirun": ("name", "code", "proves_signals", "was_ended"),  # mpirun has ended, see `MpirunEnd`
    "over": (),  # all agents wait for the next attempt, or no process of the attempt is left
    "tail": ("lines",),  # the last lines on stderr of MPIRUN, MPIRUN_AT_END or a rank
}
KINDS = OF_RANKS | OF_LAUNCHER.keys()


class Phase(IntEnum):
    """The phase of an attempt, which only moves on, never back."""

    STARTING = 0  # some ranks have not joined the job
    RUNNING = 1  # all ranks have joined; with --grow, they may be asked to stop after a step
    STOPPING = 2  # the ranks have limited time to save and stop
    ENDING = 3  # the launcher ends the ranks
    HELD = 4  # all agents wait for the next attempt, or for their end
    ENDED = 5  # no process of the attempt is left


class Stop(IntEnum):
    """The origin of a request to stop the ranks. A later request outweighs an earlier one."""

    NONE = 0
    TO_GROW = 1  # by the launcher, which restarts the job on more hosts
    BY_USER = 2
    AT_ONCE = 3  # by the user, without a save


class Announcement(NamedTuple):
    """The job's own facts for its restarts, see `mpiddp.runtime.reports.announce`."""

    resume_args: tuple[str, ...] = ()
    global_batch_size: int | None = None
    max_ranks: int | None = None
    run_dir: str = ""
    world_size: int = 0  # of the attempt that announced the global batch
    checkpoint: str = ""  # the path of the newest complete checkpoint

    def after(self, later: Announcement) -> Announcement:
        """This announcement after a later attempt's: the first values count, and the last checkpoint."""
        first = {name: value for name, value in self._asdict().items() if value}
        first["checkpoint"] = later.checkpoint or self.checkpoint
        return later._replace(**first)


class Record:
    """The events of an attempt so far. It began at the time `at`, by default now.

    `hosts` has the requested host of each rank, and `facts` are the facts of "began".
    """

    def __init__(self, hosts: Sequence[str], *, at: float | None = None, **facts: Any) -> None:
        self.hosts, self.world_size = hosts, len(hosts)
        self.latest: dict[str, dict[int, Event]] = defaultdict(dict)  # by kind and rank
        self.done: dict[int, Event] = {}  # the ranks that have ended without an error
        self.failures: dict[int, Event] = {}  # the first event of each failure, by rank
        self.saving: dict[int, float] = {}  # the ranks that save, and since when
        self.last_saved_at = 0.0  # when a rank last ended a save
        self.failed_saves = set[str]()  # each once, though it may fail on several ranks
        self.paces: dict[int, Pace] = {}  # by rank
        self.gpus: dict[int, GpuUse] = {}  # by rank
        self.shown: dict[str, Any] = {}  # numbers of the training, from rank 0
        self.announcement = Announcement()
        self.stacks: dict[int, Mapping[str, Any]] = {}  # the answers to the latest question
        # Torch's collectives, and the time of the latest call, by rank.
        self.calls: dict[int, Mapping[Group, RankCalls]] = {}
        self.called_at: dict[int, float] = {}
        # The most seconds by which a rank's clock is behind, by its latest messages, because clocks drift.
        self.clocks: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_CLOCKS))
        self.forming: dict[
            int, float
        ] = {}  # the ranks that wait in init_process_group, and since when
        # The ranks that wait for another one in recv or send, and since when.
        self.peers: dict[int, tuple[float, Mapping[str, Any]]] = {}
        self.shadows: set[int] = set()  # the ranks that have left the loop of torch's join()
        self.last_shadowed_at = 0.0  # when a rank last began or ended this
        facts = {"here": [], "attempt": 1, "hang_timeout_s": None, **facts, "hosts": [*hosts]}
        self.began_at = time.monotonic() if at is None else at
        self.add(Event("began", facts=facts, at=self.began_at))

    def add(self, event: Event) -> None:
        assert event.kind in KINDS, event
        rank, kind, facts = event.rank, event.kind, event.facts
        if kind in ("saving", "stopped") and facts.get("active", True):
            self.saving[rank] = event.at  # a script that has stopped saves before it ends
        elif kind in ENDS | {"saving"} and self.saving.pop(rank, None) is not None:
            self.last_saved_at = event.at
        if kind == "forming" and facts["active"]:
            self.forming[rank] = event.at
        elif kind in ENDS | {"forming"}:
            self.forming.pop(rank, None)
        if kind == "shadows" or (kind in ENDS and rank in self.shadows):
            (self.shadows.add if facts.get("active") else self.shadows.discard)(rank)
            self.last_shadowed_at = event.at
        # A command may start its script again, so only the agent's message ends the rank.
        if event.from_script and kind in ENDS:
            return
        self.latest[kind][rank] = event
        match kind:
            case "progress":
                self.paces.setdefault(rank, Pace()).add(event.at, facts)
                if rank == 0:
                    self.shown.update(facts.get("shown", {}))
            case "gpus":
                for of_rank in facts["ranks"]:
                    self.gpus.setdefault(of_rank["rank"], GpuUse()).add(of_rank)
            case "asked":
                self.stacks = {}
            case "stacks" if event.from_script or rank not in self.stacks:
                # An agent answers for a busy script, whose own answer may come later, and then counts.
                self.stacks[rank] = facts
            case "calls":
                # The message that has come fastest tells the clock best.
                self.clocks[rank].append(event.at - facts["now_us"] / 1e6)
                self.calls[rank] = groups = calls_of(facts, min(self.clocks[rank]))
                last = (group.calls[group.last].at for group in groups.values() if group.last)
                self.called_at[rank] = max(last, default=0.0)
                self.__dict__.pop("wait", None)  # computed again when it is read
                self.peers.pop(rank, None)
                if peer := facts.get("peer"):
                    since = min(self.clocks[rank]) + peer["since_us"] / 1e6
                    self.peers[rank] = since, peer
            case "announce":
                size = self.world_size if facts["global_batch_size"] else 0
                values = {**facts, "resume_args": tuple(facts["resume_args"]), "world_size": size}
                self.announcement = self.announcement._replace(**values)
            case "run_dir":
                self.announcement = self.announcement._replace(run_dir=facts["path"])
            case "saved":
                self.announcement = self.announcement._replace(checkpoint=facts["path"])
            case "not_saved":
                self.failed_saves.add(facts["save"])
            case "failed" if facts["code"] == STOPPED and rank in self.latest["stopped"]:
                self.done[rank] = event
            case "failed" | "lost" if rank not in self.done:
                self.failures.setdefault(rank, event)
            case "done" | "exited":
                self.done[rank] = event
                self.failures.pop(rank, None)

    # --- the acts of the launcher ---

    def act(self, kind: str) -> Event | None:
        """The launcher's latest act of this kind."""
        return self.latest[kind].get(LAUNCHER)

    def fact(self, kind: str, name: str, default: Any = None) -> Any:
        """A fact of the launcher's latest act of this kind; `default` if there is none."""
        event = self.act(kind)
        return default if event is None else event.facts.get(name, default)

    @property
    def phase(self) -> Phase:
        if self.act("over"):
            return Phase.ENDED if self.act("mpirun") else Phase.HELD
        if self.act("end"):
            return Phase.ENDING
        if self.act("grace"):
            return Phase.STOPPING
        has_joined = len(self.latest["joining"]) == self.world_size
        return Phase.RUNNING if has_joined else Phase.STARTING

    @property
    def runs(self) -> bool:
        """Whether all ranks have joined, and some have not ended."""
        return self.phase is Phase.RUNNING and bool(self.left)

    @property
    def stop(self) -> Stop:
        return Stop.AT_ONCE if self.act("kill") else Stop[self.fact("stop", "by", "NONE")]

    # --- the ranks ---

    @property
    def missing(self) -> list[int]:
        """The ranks that have not joined. If none has, the ranks that have not started, if there are any."""
        joining, everyone = self.latest["joining"], range(self.world_size)
        present = joining or self.latest["started"]
        missing = [rank for rank in everyone if rank not in present]
        return missing or [rank for rank in everyone if rank not in joining]

    @cached_property
    def wait(self) -> Wait | None:
        """The oldest wait in a collective, by the latest calls of all ranks."""
        return find_wait(self.calls, self.world_size, range(self.world_size))

    @property
    def forming_wait(self) -> Wait | None:
        """The wait in init_process_group for ranks that have not come there."""
        waiting = sorted(self.forming)
        missing = [rank for rank in self.left if rank not in self.forming]
        since = min(self.forming.values(), default=0.0)
        return Wait("init_process_group", since, waiting, missing, {}) if waiting else None

    @property
    def left(self) -> list[int]:
        """The ranks that still run, or have failed."""
        return [rank for rank in range(self.world_size) if rank not in self.done]

    @property
    def made_steps(self) -> bool:
        return bool(self.paces)

    @property
    def newest_step(self) -> int:
        """The newest step of any rank, 0 before the first."""
        return max((pace.step for pace in self.paces.values()), default=0)

    @property
    def silent_hosts(self) -> set[str]:
        """The hosts that have stopped answering, by their names in the request."""
        return {self.hosts[rank] for rank, event in self.failures.items() if is_silent(event)}

    @property
    def complaints(self) -> str:
        """The faults of hosts that waiting agents have found since the failure, in sentences."""
        errors = [event.facts["error"] for event in self.latest["held"].values()]
        return "\n".join(dict.fromkeys(filter(None, errors)))

    def host_of(self, rank: int) -> str:
        """The name of its host that a rank has reported, or else the requested host."""
        started = self.latest["started"].get(rank)
        return escaped(str(started.facts["host"] if started else self.hosts[rank]))

    def name(self, rank: int) -> str:
        return f"rank {rank} on {self.host_of(rank)}"

    def names(self, ranks: Sequence[int]) -> str:
        """The ranks with their hosts, or only the first few of many."""
        shown = ", ".join(map(self.name, ranks[:_NAMED]))
        return shown if len(ranks) <= _NAMED else f"{shown} and {len(ranks) - _NAMED} other ranks"


def is_silent(event: Event) -> bool:
    return event.kind == "lost" and bool(event.facts["silent"])


class MpirunEnd(NamedTuple):
    """How mpirun ended."""

    name: str  # its program
    code: int  # its exit code; -N if signal N killed it
    # Whether the code 128 + N proves that signal N has killed a rank, and any other code that no signal has.
    proves_signals: bool = False
    was_ended: bool = False  # whether this launcher has ended it

    @property
    def rank_signal(self) -> str:
        """The signal that killed a rank, "" if the code does not tell."""
        number = self.code - 128  # a number above 31 belongs to an error of mpirun itself
        return signal_name(number) if self.proves_signals and 0 < number < 32 else ""


class Outcome(NamedTuple):
    """The launcher's exit code, the sentence that explains it, and the facts for the next attempt."""

    code: int
    sentence: str = ""
    rank: int | None = None  # the rank that failed first, if it is known
    host: str | None = None  # its host, by the host's own name
    is_complete: bool = True  # whether mpirun's own message about the end adds nothing
    # The host at fault, by its name in the request, or "" if it is unknown or if the script itself failed.
    host_at_fault: str = ""
    names_event: bool = False  # `sentence` names the event that precedes every error
    known_cause: str = ""  # a sentence to print below `sentence`
    stop: Stop = Stop.NONE
    announcement: Announcement = Announcement()
    made_steps: bool = False
    gpus: Sequence[Mapping[str, Any]] = ()  # the use of each rank's GPU, where it is known
    num_failed_saves: int = 0
    written: str = ""  # the file that the script has written last, and when
    # Whether a person has requested the stop: Ctrl-C, `mpiddp stop`, --stop-after.
    is_by_person: bool = False

    @property
    def new_checkpoint(self) -> str:
        """The newest checkpoint of the job that this launcher has seen, or the file written last, or ""."""
        return self.announcement.checkpoint or self.written
