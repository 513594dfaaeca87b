"""Which rank has entered which collective, from the calls that ranks report: who waits, for whom, since when.

All here is a function of these calls, by group and rank. A call has the same number on all ranks of its
group, on gloo and on NCCL. Clocks of hosts differ, so a rank's times are read by the clock of the launcher.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

# Calls whose ranks give tensors of the same size. Those of other calls may differ.
_OF_ONE_SIZE = ("all_reduce (", "broadcast (", "reduce (")


class Call(NamedTuple):
    """One call of a rank: such as "all_reduce (float32, 1,048,576)", and when, by the launcher's clock."""

    kind: str
    at: float
    has_ended: bool


# The latest calls of each rank by their numbers, in the groups of the job: by name and ranks.
Group: TypeAlias = "tuple[str, tuple[int, ...] | None]"
Calls: TypeAlias = Mapping[Group, Mapping[int, Mapping[int, Call]]]


class Wait(NamedTuple):
    """A call that ranks have entered, and that has not ended."""

    call: str  # such as "all_reduce no. 31 (float32, 1,048,576)"
    since: float
    waiting: list[int]
    missing: list[int]  # the ranks of the group that have not entered it
    others: dict[int, str]  # the calls of the ranks that have called something else

    @property
    def calls(self) -> dict[str, list[int]]:
        """The differing calls, each with its ranks."""
        found = {self.call: [*self.waiting]}
        for rank, call in sorted(self.others.items()):
            found.setdefault(call, []).append(rank)
        return found


def _numbered(kind: str, number: int) -> str:
    op, bracket, size = kind.partition(" (")
    return f"{op} no. {number}{bracket}{size}"


def calls_of(facts: Mapping[str, Any], clock: float) -> dict[Group, dict[int, Call]]:
    """The calls in a message "calls" of a rank whose clock is `clock` seconds behind the launcher's."""
    return {
        (group["name"], group["ranks"] and tuple(group["ranks"])): {
            number: Call(group["kinds"][kind], clock + at_us / 1e6, has_ended)
            for number, kind, at_us, has_ended in group["calls"]
        }
        for group in facts["groups"]
    }


def called_at(calls: Calls) -> dict[int, float]:
    """The time of each rank's latest call. A rank without calls has no entry."""
    found: dict[int, float] = {}
    for ranks in calls.values():
        for rank, of_rank in ranks.items():
            if of_rank:
                found[rank] = max(found.get(rank, 0.0), of_rank[max(of_rank)].at)
    return found


def find_wait(
    calls: Calls, world_size: int, told: Collection[int], *, is_over: bool = False
) -> Wait | None:
    """The collective that some ranks have entered and others have not, since the longest time.

    If each missing rank waits itself, the ranks wait for each other in different groups, and all of their
    calls are told.

    told: the ranks whose calls are current. is_over: a rank has failed, so its calls have ended.
    """
    found = [
        wait
        for (_, members), ranks in calls.items()
        if (wait := _wait_in(members or range(world_size), ranks, told, is_over=is_over))
        and (wait.missing or wait.others)
    ]
    waiting = {rank for wait in found for rank in wait.waiting}
    roots = [wait for wait in found if wait.others or not waiting.issuperset(wait.missing)]
    oldest = min(roots or found, key=lambda wait: wait.since, default=None)
    if oldest is None or roots:
        return oldest
    elsewhere = {rank: wait.call for wait in found for rank in wait.waiting if wait is not oldest}
    return oldest._replace(missing=[], others=elsewhere)


def _wait_in(
    members: Sequence[int],
    ranks: Mapping[int, Mapping[int, Call]],
    told: Collection[int],
    *,
    is_over: bool,
) -> Wait | None:
    """The first call of a group that some ranks have entered, and that has not ended on all of these."""
    last = {rank: max(ranks.get(rank, {}), default=0) for rank in members}
    # What is beyond has been entered in vain.
    shared = min(last.values()) if is_over else max(last.values())
    open_: dict[int, int] = {}  # of each rank, the first that has not ended
    for rank in ranks.keys() & set(told):
        lasting = [n for n, call in ranks[rank].items() if not call.has_ended or n > shared]
        if lasting:
            open_[rank] = min(lasting)
    if not open_:
        return None
    number = min(open_.values())
    entered = {rank: of_rank[number] for rank, of_rank in ranks.items() if number in of_rank}
    first = entered[min(rank for rank, each in open_.items() if each == number)].kind
    same = {rank: call for rank, call in entered.items() if _is_same(call.kind, first)}
    differing = {rank: call.kind for rank, call in entered.items() if rank not in same}
    others = {rank: _numbered(kind, number) for rank, kind in differing.items()}
    missing = [rank for rank in members if last[rank] < number]
    since = min(call.at for call in same.values())
    waiting = [rank for rank in sorted(same) if is_over or open_.get(rank) == number]
    return Wait(_numbered(first, number), since, waiting, missing, others)


def _is_same(kind: str, other: str) -> bool:
    """Whether two ranks may make these calls as one."""
    if not kind.startswith(_OF_ONE_SIZE):
        kind, other = kind.partition(" (")[0], other.partition(" (")[0]
    return kind == other
