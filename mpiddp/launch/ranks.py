"""What the ranks of an attempt have reported so far, who is missing, late or slow, and what is shown of them.

Only the event loop changes it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from mpiddp.errors import STOPPED
from mpiddp.protocol.server import Message
from mpiddp.text import counted, duration, escaped, seconds, size_text

_NAMED = 4  # ranks in one sentence
# What people look at first, as a narrow terminal cuts the rest.
_FIRST = ("epoch", "train_loss", "loss", "test_accuracy", "accuracy", "lr")
_QUIET_STEPS, _QUIET_S = 10, 3.0  # without a step: a rank is quiet after the longer of these
_LONGEST_LINE = 200  # characters of a rank's last line
MPIRUN, MPIRUN_AT_END = -1, -2  # who prints beside the ranks, until all have joined, and then

WINDOW_S = 10.0  # of the steps that count, unless two steps take longer
FACTOR, FACTOR_OF_SEVERAL = 1.3, 2.0  # of the others' own time
_MOST_LATE = 2 / 3  # of all ranks
_LEAST_SHARE = 0.5  # of a step: if the rank is faster, something else takes the time
_MOST_SPREAD = 1.2  # of the times of a step: ranks that differ more do not wait for each other


class Announcement(NamedTuple):
    """What the job announces for its restarts, see `mpiddp.runtime.reports.announce`."""

    resume_args: tuple[str, ...] = ()
    global_batch_size: int | None = None
    max_ranks: int | None = None
    run_dir: str = ""
    world_size: int = 0  # of the attempt that announced the global batch
    checkpoint: str = ""  # the newest that is complete

    def after(self, later: Announcement) -> Announcement:
        """This one after a later attempt. The first of each kind counts, and the last checkpoint."""
        first = {name: value for name, value in self._asdict().items() if value}
        first["checkpoint"] = later.checkpoint or self.checkpoint
        return later._replace(**first)


class Ranks:
    """The reports of all ranks. `hosts` has the requested host of each rank."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts = hosts
        self.world_size = len(hosts)
        # The latest message of each rank, by kind: of the kinds that are only remembered.
        self.said: dict[str, dict[int, Message]] = defaultdict(dict)
        self.done: dict[int, Message] = {}  # ended without an error
        self.failures: dict[int, Message] = {}  # failed or lost, the first message of a rank
        self.saving: dict[int, float] = {}  # and since when
        self.last_saved_at = 0.0  # when a rank last ended a save
        self.paces: dict[int, Pace] = {}  # of their latest steps
        self.shown: dict[str, Any] = {}  # what rank 0 says of its training
        self.stacks: dict[int, dict[str, Any]] = {}
        self.announcement = Announcement()

    def note(self, message: Message) -> None:
        rank, kind, facts, at, is_of_script = message
        is_end = kind in ("done", "exited", "failed", "lost")
        if kind in ("saving", "stopped") and facts.get("active", True):
            self.saving[rank] = at  # a script that has stopped saves, and leaves
        elif (is_end or kind == "saving") and self.saving.pop(rank, None) is not None:
            self.last_saved_at = at
        # Only the rank knows whether its command succeeds: it may start the script again.
        if is_of_script and is_end:
            return
        match kind:
            case "started" | "joining" | "log" | "supports_stop" | "stopped" | "claim":
                self.said[kind][rank] = message
            case "progress":
                self.paces.setdefault(rank, Pace()).add(at, facts)
                if rank == 0:
                    self.shown.update(facts.get("shown", {}))
            case "stacks" if is_of_script or rank not in self.stacks:
                # An agent answers in the place of a script that makes steps, unless that is only slow.
                is_held = not is_of_script and rank in self.paces
                self.stacks[rank] = {**facts, "is_held": is_held}
            case "announce":
                size = self.world_size if facts["global_batch_size"] else 0
                known = {**facts, "resume_args": tuple(facts["resume_args"]), "world_size": size}
                self.announcement = self.announcement._replace(**known)
            case "run_dir":
                self.announcement = self.announcement._replace(run_dir=facts["path"])
            case "saved":
                self.announcement = self.announcement._replace(checkpoint=facts["path"])
            case "done" | "exited":
                self.done[rank] = message
            case "failed" if facts["code"] == STOPPED and rank in self.said["stopped"]:
                self.done[rank] = message
            case "failed" | "lost" if rank not in self.done:
                self.failures.setdefault(rank, message)

    @property
    def missing(self) -> list[int]:
        """The ranks that have not joined; or those that have not started, for which the others wait."""
        joining, everyone = self.said["joining"], range(self.world_size)
        here = joining or self.said["started"]
        left = [rank for rank in everyone if rank not in here]
        return left or [rank for rank in everyone if rank not in joining]

    @property
    def left(self) -> list[int]:
        """The ranks that have not ended without an error."""
        return [rank for rank in range(self.world_size) if rank not in self.done]

    @property
    def newest_step(self) -> tuple[int, float]:
        """The newest step of any rank, and since when: 0 and 0.0 before the first."""
        return max(((pace.step, pace.since) for pace in self.paces.values()), default=(0, 0.0))

    @property
    def silent_hosts(self) -> set[str]:
        """The ones of `hosts` that stopped answering."""
        return {self.hosts[rank] for rank, message in self.failures.items() if is_silent(message)}

    def host_of(self, rank: int) -> str:
        """The rank's own name of its host, once it has reported it; else the requested host."""
        started = self.said["started"].get(rank)
        return escaped(str(started.facts["host"] if started else self.hosts[rank]))

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
        late = [rank for rank in self.left if rank in self.said["started"]]
        return f"{self.names(late)} had not stopped {limit_s:g} s after the request (--grace)"


def is_silent(message: Message) -> bool:
    return message.kind == "lost" and bool(message.facts["silent"])


# --- which rank is a straggler: its own work makes the others wait ---

# A rank's own time is that in which the thread that makes its steps ran, or could run and waited for a core.
# The rest of a step it waits: for other ranks, for data, for a disk or a GPU. Ranks that wait for a GPU or in
# NCCL use their core meanwhile, so all their own times are equal, and none is named.
#
# `mpiddp train` tells the phases of its steps. There a rank's own time is that of all phases but "waiting".
# A sharded model, or synchronized BatchNorm, waits in every phase, so what these ranks tell does not count.


class StepTime(NamedTuple):
    """The mean seconds of a rank's latest steps. `cpu_s` is that of all its threads."""

    step_s: float
    own_s: float
    cpu_s: float


class Pace:
    """The latest steps of one rank."""

    def __init__(self) -> None:
        self.step, self.since = -1, 0.0  # the present step, and since when
        self.memory = 0  # of the process, in bytes
        # The time of a step, its number, and the totals of the rank's thread and of its process.
        self._samples: deque[tuple[float, int, float, float]] = deque()
        self._phases = (0.0, 0.0)  # steps and own time by the latest report of phases
        self._own_s: float | None = None  # of a step, by the latest two reports of phases

    def add(self, at: float, facts: Mapping[str, Any]) -> None:
        """The rank has reported a step, a message "progress"."""
        self.memory = facts["memory"]
        samples, step, own_s = self._samples, facts["step"], facts["own_s"]
        if step != self.step:  # it may begin anew
            self.step, self.since = step, at
        if samples and (step <= samples[-1][1] or own_s < samples[-1][2]):
            samples.clear()  # the script has begun anew, or another thread makes the steps now
        samples.append((at, step, own_s, facts["cpu_s"]))
        while len(samples) > 2 and samples[1][0] <= at - WINDOW_S:
            samples.popleft()
        phases = facts.get("phases", {})
        if phases.get("waiting"):
            own_s = sum(phases[name] for name in phases.keys() - {"waiting", "steps"})
            steps_before, own_before = self._phases
            if (steps := phases["steps"] - steps_before) > 0:
                self._own_s = (own_s - own_before) / steps
            self._phases = phases["steps"], own_s

    @property
    def step_time(self) -> StepTime | None:
        """None until there are two reports, and if the clock has stood still between them (Ctrl-Z)."""
        began_at, *began = self._samples[0]
        at, *now = self._samples[-1]
        if at <= began_at:
            return None
        steps, own_s, cpu_s = (last - first for first, last in zip(began, now, strict=True))
        own_s = own_s / steps if self._own_s is None else self._own_s
        return StepTime((at - began_at) / steps, own_s, cpu_s / steps)


def find_stragglers(ranks: Ranks) -> tuple[list[int], str]:
    """The ranks that make the others wait in the latest steps, the slowest first, and what they do."""
    times = {rank: time for rank, pace in ranks.paces.items() if (time := pace.step_time)}
    step_s = [each.step_s for each in times.values()]
    if len(times) < 2 or max(step_s) > _MOST_SPREAD * min(step_s):
        return [], ""
    by_time = sorted(times, key=lambda rank: times[rank].own_s, reverse=True)
    time = times[by_time[0]]
    if time.own_s < _LEAST_SHARE * time.step_s:
        return [], ""
    late = [rank for rank in by_time if times[rank].own_s * FACTOR > time.own_s]
    for number, factor in ((len(late), FACTOR_OF_SEVERAL), (1, FACTOR)):
        if number <= _MOST_LATE * len(times):
            others_s = times[by_time[(number + len(times) - 1) // 2]].own_s  # the one in the middle
            if time.own_s >= factor * others_s:
                times_as_long = time.own_s / max(others_s, 1e-9)
                often = f"{times_as_long:.1f}" if times_as_long < 100 else "over 100"
                works = f"works for {seconds(time.own_s)} in a step of {seconds(time.step_s)}"
                return by_time[:number], f"{works}, {often} times as long as the others."
    return [], ""


def straggler_sentence(ranks: Ranks, found: Sequence[int], works: str) -> str:
    """The sentence about some of the ranks of `find_stragglers`; "" for none."""
    are = "is a straggler: it" if len(found) == 1 else "are stragglers: each"
    return f"{ranks.names(found)} {are} {works}" if found else ""


# --- what is shown: the status below the output on a terminal, and the facts for `mpiddp top` ---


def status_lines(ranks: Ranks, attempt: int, straggler: str, now: float) -> list[str]:
    """The lines of the status; none before the first step. `straggler` is a sentence, "" without one."""
    if not ranks.paces:
        return []
    (step, _), shown = ranks.newest_step, dict(ranks.shown)
    total = shown.pop("total", None)
    has_total = type(total) is int and total >= max(step, 1)
    training = [f"step {step:,}/{total:,} ({step / total:.0%})" if has_total else f"step {step:,}"]
    times = [time.step_s for pace in ranks.paces.values() if (time := pace.step_time)]
    if times:
        training.append(f"{1 / max(times):.3g} steps/s")
        if has_total and step < total:
            training.append(f"{duration((total - step) * max(times))} left")
    for name in sorted(shown, key=lambda name: [*_FIRST, name].index(name)):
        value = shown[name]
        training.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    hosts = counted(len(set(ranks.hosts)), "host")
    machines = [f"{counted(ranks.world_size, 'rank')} on {hosts}"]
    if attempt > 1:
        machines.append(f"attempt {attempt}")
    machines.append(f"{size_text(max(pace.memory for pace in ranks.paces.values()))} a rank")
    if straggler:
        machines.append(straggler.partition(":")[0])
    if ranks.saving:
        machines.append("saving")
    elif ranks.last_saved_at:
        machines.append(f"saved {duration(now - ranks.last_saved_at)} ago")
    return [escaped("  ".join(training)), escaped("  ".join(machines))]


def job_facts(ranks: Ranks, latest: Mapping[int, bytes], now: float) -> dict[str, Any]:
    """The state of the job and of each rank: seconds, and bytes. `latest` ends with the rank's last line."""
    table = [
        _rank_facts(ranks, rank, latest.get(rank, b""), now) for rank in range(ranks.world_size)
    ]
    return {
        "ranks": table,
        "step": ranks.newest_step[0] if ranks.paces else None,
        "rate": max((facts["rate"] for facts in table if "rate" in facts), default=None),
    }


def _rank_facts(ranks: Ranks, rank: int, latest: bytes, now: float) -> dict[str, Any]:
    states: dict[str, Collection[int]] = {
        "failed": ranks.failures,
        "done": ranks.done,
        "saving": ranks.saving,
        "running": ranks.said["joining"],
        "joining": ranks.said["started"],
    }
    # Of the last line that is not empty, what a terminal shows.
    line = latest.decode(errors="replace").rstrip().replace("\r", "\n").rpartition("\n")[2]
    facts = {
        "rank": rank,
        "host": ranks.host_of(rank),
        "state": next((state for state, of in states.items() if rank in of), "starting"),
        "line": escaped(line[-_LONGEST_LINE:]),
    }
    if pace := ranks.paces.get(rank):
        ago_s = now - pace.since
        facts |= {"step": pace.step, "ago_s": ago_s, "memory": pace.memory}
        if time_of_step := pace.step_time:
            step_s, own_s, cpu_s = time_of_step
            if facts["state"] == "running" and ago_s > max(_QUIET_STEPS * step_s, _QUIET_S):
                facts["state"], step_s = "quiet", ago_s
            facts |= {"rate": 1 / step_s, "own_s": own_s, "wait_s": max(0.0, step_s - own_s)}
            facts["cores"] = cpu_s / step_s
    return facts
