"""The ranks that wait in a collective, the ranks for which they wait, and since when.

Everything here is a function of the calls that ranks report, by group and rank. A call has the same number on
all ranks of its group, on gloo and on NCCL. Its times are converted to the clock of the launcher.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

# All ranks give these calls tensors of the same size. In other calls, the sizes may differ.
_OF_ONE_SIZE = ("all_reduce (", "broadcast (", "reduce (")


class Call(NamedTuple):
    """A call of a rank, such as "all_reduce (float32, 1,048,576)", and its time by the launcher's clock."""

    kind: str
    at: float
    has_ended: bool


class RankCalls(NamedTuple):
    """The latest calls of a rank in one group, by their numbers."""

    calls: Mapping[int, Call]
    last: int  # the number of the last call, 0 without a call
    first_open: int | None  # the number of the first call that has not ended


# The group's name and its ranks; None if it has all ranks.
Group: TypeAlias = "tuple[str, tuple[int, ...] | None]"
# The calls of each rank, by group.
Calls: TypeAlias = Mapping[int, Mapping[Group, RankCalls]]


class Wait(NamedTuple):
    """A call that ranks have entered, and that has not ended."""

    call: str  # such as "all_reduce no. 31 (float32, 1,048,576)"
    since: float
    waiting: list[int]
    missing: list[int]  # the ranks of the group that have not entered it
    others: dict[int, str]  # the calls of the ranks that have called something else

    @property
    def calls(self) -> dict[str, list[int]]:
        """The different calls, with the ranks of each."""
        ranks = {self.call: [*self.waiting]}
        for rank, call in sorted(self.others.items()):
            ranks.setdefault(call, []).append(rank)
        return ranks


def _numbered(kind: str, number: int) -> str:
    op, bracket, size = kind.partition(" (")
    return f"{op} no. {number}{bracket}{size}"


def calls_of(facts: Mapping[str, Any], clock: float) -> dict[Group, RankCalls]:
    """The calls in a message "calls" of a rank, whose clock is `clock` seconds behind the launcher's."""
    groups: dict[Group, RankCalls] = {}
    for group in facts["groups"]:
        calls = {
            number: Call(group["kinds"][kind], clock + at_us / 1e6, has_ended)
            for number, kind, at_us, has_ended in group["calls"]
        }
        key = group["name"], group["ranks"] and tuple(group["ranks"])
        first_open = min((number for number in calls if not calls[number].has_ended), default=None)
        groups[key] = RankCalls(calls, max(calls, default=0), first_open)
    return groups


def by_group(calls: Calls) -> dict[Group, dict[int, RankCalls]]:
    groups: dict[Group, dict[int, RankCalls]] = {}
    for rank, groups_of_rank in calls.items():
        for group, rank_calls in groups_of_rank.items():
            groups.setdefault(group, {})[rank] = rank_calls
    return groups


def last_call_with(others: Collection[int], groups: Mapping[Group, RankCalls]) -> float:
    """When a rank last called a collective that needs one of the `others`; -inf if it never has."""
    shared = [
        rank_calls
        for (_, ranks), rank_calls in groups.items()
        if ranks is None or not {*ranks}.isdisjoint(others)
    ]
    return max(
        (group.calls[group.last].at for group in shared if group.last), default=float("-inf")
    )


def find_wait(
    calls: Calls, world_size: int, told: Collection[int], *, is_over: bool = False
) -> Wait | None:
    """The oldest collective that some ranks have entered and others have not.

    If every missing rank waits too, the ranks wait for each other in different groups, and the wait has all
    of their calls. `told` are the ranks whose calls are up to date. `is_over`: a rank has failed and calls no more.
    """
    waits = [
        wait
        for (_, members), ranks in by_group(calls).items()
        if (wait := _wait_in(members or range(world_size), ranks, told, is_over=is_over))
        and (wait.missing or wait.others)
    ]
    waiting = {rank for wait in waits for rank in wait.waiting}
    roots = [wait for wait in waits if wait.others or not waiting.issuperset(wait.missing)]
    oldest = min(roots or waits, key=lambda wait: wait.since, default=None)
    if oldest is None or roots:
        return oldest
    elsewhere = {rank: wait.call for wait in waits for rank in wait.waiting if wait is not oldest}
    return oldest._replace(missing=[], others=elsewhere)


def _wait_in(
    members: Sequence[int], ranks: Mapping[int, RankCalls], told: Collection[int], *, is_over: bool
) -> Wait | None:
    """The first call of a group that has not ended on all ranks that have entered it."""
    # The number of the first call that each rank has entered, and that has not ended.
    current = {rank: ranks[rank].first_open for rank in ranks if rank in told}
    last = {rank: ranks[rank].last if rank in ranks else 0 for rank in members}
    if is_over:  # calls that some ranks have not entered cannot have succeeded
        shared = min(last.values())
        for rank in current:
            calls = ranks[rank].calls.items()
            open_ = (n for n, call in calls if not call.has_ended or n > shared)
            current[rank] = min(open_, default=None)
    number = min((n for n in current.values() if n is not None), default=None)
    if number is None:
        return None
    entered = {rank: made.calls[number] for rank, made in ranks.items() if number in made.calls}
    kind = entered[min(rank for rank in current if current[rank] == number)].kind
    same = {rank: call for rank, call in entered.items() if _is_same(call.kind, kind)}
    others = {
        rank: _numbered(call.kind, number) for rank, call in entered.items() if rank not in same
    }
    missing = [rank for rank in members if last[rank] < number]
    since = min(call.at for call in same.values())
    waiting = [rank for rank in sorted(same) if is_over or current.get(rank) == number]
    return Wait(_numbered(kind, number), since, waiting, missing, others)


def _is_same(first: str, second: str) -> bool:
    """Whether these calls of two ranks can belong to one collective."""
    if not first.startswith(_OF_ONE_SIZE):
        first, second = first.partition(" (")[0], second.partition(" (")[0]
    return first == second
