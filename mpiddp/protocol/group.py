"""What the members of one job agree on: gathers, and the first failure. No sockets.

The server of the job channel has one group for the ranks, and one for the n-th scripts of all ranks. It
passes on each member's messages, and sends the replies. Nothing here waits: whoever owns the group calls
`expire` at `next_deadline`, by its own clock, so that a server that is stopped ends no wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mpiddp.protocol.channel import encode, listed

KINDS = frozenset({"gather", "claim", "fail"})  # the messages that `Group.receive` takes
_NEVER = float("inf")
_LONGEST_KEY = 1024  # characters
_LARGEST_CODE = 255


class Reply(NamedTuple):
    """A message for some members. All of them get the same bytes: it is encoded once."""

    ranks: Iterable[int]
    line: bytes


@dataclass
class _Gather:
    deadline: float = _NEVER
    calls: bool = False  # the members that have not given a value yet are told
    or_gone: bool = False  # a member whose connection has ended gives null
    values: dict[int, bytes] = field(default_factory=dict)  # by rank


class Group:
    """The members [0, world_size) of one group."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        # The messages of the first member that has failed: by key of its claim, and to end the others.
        self._claimed: dict[str, bytes] = {}
        self._failed = b""
        self._gathers: dict[str, _Gather] = {}
        self._late: dict[str, list[int]] = {}  # gathers that are over: the ranks that were missing
        self._gone: set[int] = set()  # members whose connection has ended

    def receive(self, rank: int, facts: dict[str, Any], value: bytes, now: float) -> list[Reply]:
        """Take a message of a member.

        Raises:
            ValueError, LookupError, TypeError: it violates the protocol.
        """
        if facts["type"] == "gather":
            return self._gather(rank, facts, value, now)
        if facts["type"] == "claim":
            return self._claim(rank, _key_of(facts))
        return self._fail(rank, facts["code"])

    def enter(self, rank: int) -> list[Reply]:
        """A member that enters late learns at once of failures, and of the gathers that call it."""
        self._gone.discard(rank)
        called = [encode("called", key=key) for key, each in self._gathers.items() if each.calls]
        lines = (*self._claimed.values(), self._failed, *called)
        return [Reply([rank], line) for line in lines if line]

    def lose(self, rank: int) -> list[Reply]:
        """A member's connection has ended."""
        self._gone.add(rank)
        keys = [key for key, each in self._gathers.items() if each.or_gone]
        for key in keys:
            self._gathers[key].values.setdefault(rank, b"null")
        return [reply for key in keys for reply in self._complete(key)]

    @property
    def next_deadline(self) -> float:
        """When to call `expire`; infinite if no member waits."""
        return min((each.deadline for each in self._gathers.values()), default=_NEVER)

    def expire(self, now: float) -> list[Reply]:
        """Answer the members whose wait has lasted too long, with the ranks that are missing."""
        replies = []
        for key in [key for key, each in self._gathers.items() if each.deadline <= now]:
            values = self._gathers.pop(key).values
            self._late[key] = [rank for rank in range(self.world_size) if rank not in values]
            replies.append(Reply(list(values), _no_answer(key, self._late[key])))
        return replies

    # --- gathers: every member gives a value, and gets those of all ---

    def _gather(self, rank: int, facts: dict[str, Any], value: bytes, now: float) -> list[Reply]:
        key = _key_of(facts)
        if not value:
            raise ValueError("no value")
        if key in self._late:
            return [Reply([rank], _no_answer(key, self._late[key]))]
        gather = self._gathers.setdefault(key, _Gather())
        if rank in gather.values:
            raise ValueError("a second value")
        gather.deadline = min(gather.deadline, now + _timeout_of(facts))
        gather.values[rank] = value
        if facts.get("or_gone") is True and not gather.or_gone:
            gather.or_gone = True
            gather.values |= dict.fromkeys(self._gone - gather.values.keys(), b"null")
        replies = []
        if facts.get("calls") is True and not gather.calls:
            gather.calls = True
            others = [each for each in range(self.world_size) if each not in gather.values]
            replies.append(Reply(others, encode("called", key=key)))
        return replies + self._complete(key)

    def _complete(self, key: str) -> list[Reply]:
        """The answer for all, if no member is missing."""
        values = self._gathers[key].values
        if len(values) < self.world_size:
            return []
        del self._gathers[key]
        return [Reply(range(self.world_size), encode("gathered", listed(values), key=key))]

    # --- failures ---

    def _claim(self, rank: int, key: str) -> list[Reply]:
        """The first member that claims to have failed first is told so, and all others learn of it."""
        is_first = key not in self._claimed
        line = self._claimed.setdefault(key, encode("claimed", rank=rank, key=key))
        return [Reply(range(self.world_size) if is_first else [rank], line)]

    def _fail(self, rank: int, code: object) -> list[Reply]:
        """End the other members with the exit code of the first that asks."""
        if type(code) is not int or not 0 < code <= _LARGEST_CODE:
            raise ValueError("not the code of a failure")
        if self._failed:
            return []
        self._failed = encode("failed", code=code)
        return [Reply([each for each in range(self.world_size) if each != rank], self._failed)]


def _key_of(facts: dict[str, Any]) -> str:
    key = facts["key"]
    if type(key) is not str or not 0 < len(key) <= _LONGEST_KEY:
        raise ValueError("no key")
    return key


def _no_answer(key: str, missing: Sequence[int]) -> bytes:
    return encode("no_answer", key=key, missing=missing)


def _timeout_of(facts: dict[str, Any]) -> float:
    """The seconds that a member waits; infinite for None."""
    timeout_s = facts["timeout_s"]
    if timeout_s is None:
        return _NEVER
    if not isinstance(timeout_s, (int, float)) or not timeout_s >= 0:  # refuses NaN too
        raise ValueError("not a time")
    return float(timeout_s)
