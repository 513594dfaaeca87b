"""What the members of one job agree on: gathers, values of single ranks, failures. No sockets.

The server of the job channel has one group for the ranks, and one for the n-th children of all ranks. It
passes on each member's messages, and sends the replies. Nothing here waits: whoever owns the group calls
`expire` at `next_deadline`, by its own clock, so that a server that is stopped ends no wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mpiddp.protocol.channel import encode, listed

_NEVER = float("inf")
_LONGEST_KEY = 1024  # characters
_LARGEST_CODE = 255


class Reply(NamedTuple):
    """A message for some members. All of them get the same bytes: it is encoded once."""

    ranks: Iterable[int]
    line: bytes


@dataclass
class _Gather:
    deadline: float
    calls: bool = False  # the members that have not given a value yet are told
    values: dict[int, bytes] = field(default_factory=dict)  # by rank


@dataclass(eq=False)
class _Wait:
    """A member that collects the values of `ranks`. `number` is that of its request."""

    rank: int
    number: int
    key: str
    ranks: Sequence[int]
    missing: set[int]
    deadline: float
    or_gone: bool  # a member whose connection has ended is not missing


class Group:
    """The members [0, world_size) of one group."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        # By session, see `mpiddp.runtime.job.channel`: the message of the first member.
        self._claimed: dict[int, bytes] = {}
        self._failed: dict[int, bytes] = {}
        self._gathers: dict[str, _Gather] = {}
        self._late: dict[str, list[int]] = {}  # gathers that are over: the ranks that were missing
        self._values: dict[str, dict[int, bytes]] = {}  # by key and rank
        self._waits: dict[str, list[_Wait]] = {}  # by key
        self._gone: set[int] = set()  # members whose connection has ended
        self._given_up: dict[int, _Wait] = {}  # by rank: the latest wait that has lasted too long
        self._handlers: dict[str, Callable[..., list[Reply]]] = {
            "gather": self._gather,
            "put": self._put,
            "collect": self._collect,
            "forget": self._forget,
            "claim": self._claim,
            "fail": self._fail,
        }

    @property
    def kinds(self) -> Iterable[str]:
        """The messages that `receive` takes."""
        return self._handlers

    def receive(self, rank: int, facts: dict[str, Any], value: bytes, now: float) -> list[Reply]:
        """Take a message of a member.

        Raises:
            ValueError, LookupError, TypeError: it violates the protocol.
        """
        return self._handlers[facts["type"]](rank, facts, value, now)

    def enter(self, rank: int) -> list[Reply]:
        """A member that enters late learns at once of failures, and of the gathers that call it."""
        self._gone.discard(rank)
        called = [encode("called", key=key) for key, each in self._gathers.items() if each.calls]
        lines = [*self._claimed.values(), *self._failed.values(), *called]
        return [Reply([rank], line) for line in lines]

    def lose(self, rank: int) -> list[Reply]:
        """A member's connection has ended."""
        self._gone.add(rank)
        return self._arrived(rank, [wait for wait in self._all_waits() if wait.or_gone])

    @property
    def next_deadline(self) -> float:
        """When to call `expire`; infinite if no member waits."""
        waiting = [gather.deadline for gather in self._gathers.values()]
        waiting += [wait.deadline for waits in self._waits.values() for wait in waits]
        return min(waiting, default=_NEVER)

    def expire(self, now: float) -> list[Reply]:
        """Answer the members whose wait has lasted too long, with the ranks that are missing."""
        replies = []
        for key in [key for key, each in self._gathers.items() if each.deadline <= now]:
            values = self._gathers.pop(key).values
            self._late[key] = [rank for rank in range(self.world_size) if rank not in values]
            replies.append(Reply(list(values), _no_answer(self._late[key], key=key)))
        late = [wait for wait in self._all_waits() if wait.deadline <= now]
        for wait in late:
            self._given_up[wait.rank] = wait
            self._end(wait)
        for wait in late:
            answer = _no_answer(self._silent(wait), number=wait.number)
            replies.append(Reply([wait.rank], answer))
        return replies

    # --- gathers: every member gives a value, and gets those of all ---

    def _gather(self, rank: int, facts: dict[str, Any], value: bytes, now: float) -> list[Reply]:
        key = _key_of(facts)
        if key in self._late:
            return [Reply([rank], _no_answer(self._late[key], key=key))]
        replies = []
        gather = self._gathers.get(key)
        if gather is None:
            gather = self._gathers[key] = _Gather(now + _timeout_of(facts))
        if rank in gather.values:
            raise ValueError("a second value")
        if not value:
            raise ValueError("no value")
        gather.values[rank] = value
        if facts.get("calls") is True and not gather.calls:
            gather.calls = True
            others = [each for each in range(self.world_size) if each not in gather.values]
            replies.append(Reply(others, encode("called", key=key)))
        if len(gather.values) == self.world_size:
            del self._gathers[key]
            answer = encode("gathered", listed(gather.values), key=key)
            replies.append(Reply(range(self.world_size), answer))
        return replies

    # --- values of single ranks, which others collect ---

    def _put(self, rank: int, facts: dict[str, Any], value: bytes, now: float) -> list[Reply]:
        if not value:
            raise ValueError("no value")
        key = _key_of(facts)
        self._values.setdefault(key, {})[rank] = value
        return self._arrived(rank, self._waits.get(key, ()))

    def _arrived(self, rank: int, waits: Sequence[_Wait]) -> list[Reply]:
        """These waits miss this rank no longer."""
        replies = []
        for wait in list(waits):
            wait.missing.discard(rank)
            if not wait.missing:
                self._end(wait)
                replies.append(self._collected(wait))
        return replies

    def _collect(self, rank: int, facts: dict[str, Any], value: bytes, now: float) -> list[Reply]:
        ranks, number = facts["ranks"], facts["number"]
        if type(number) is not int or type(ranks) is not list or not ranks:
            raise ValueError("not a request")
        if not all(type(each) is int and 0 <= each < self.world_size for each in ranks):
            raise ValueError("a rank that does not exist")
        key, or_gone = _key_of(facts), facts.get("or_gone") is True
        missing = set(ranks) - self._values.get(key, {}).keys()
        missing -= self._gone if or_gone else set()
        wait = _Wait(rank, number, key, ranks, missing, now + _timeout_of(facts), or_gone)
        if not missing:
            return [self._collected(wait)]
        self._waits.setdefault(key, []).append(wait)
        return []

    def _collected(self, wait: _Wait) -> Reply:
        found = self._values.get(wait.key, {})
        values = b"[%b]" % b", ".join(found.get(rank, b"null") for rank in wait.ranks)
        return Reply([wait.rank], encode("collected", values, number=wait.number))

    def _end(self, wait: _Wait) -> None:
        self._waits[wait.key].remove(wait)
        if not self._waits[wait.key]:
            del self._waits[wait.key]

    def _all_waits(self) -> list[_Wait]:
        return [wait for waits in self._waits.values() for wait in waits]

    def _forget(self, rank: int, facts: dict[str, Any], value: bytes, now: float) -> list[Reply]:
        """Forget this member's values whose keys have a prefix, once every member has read them."""
        prefix = _key_of(facts)
        for key in [key for key in self._values if key.startswith(prefix)]:
            self._values[key].pop(rank, None)
            if not self._values[key]:
                del self._values[key]
        return []

    def _silent(self, wait: _Wait) -> list[int]:
        """The ranks that are the cause: if a missing rank waits itself, those that it waits for.

        So does one that has given up a wait under the same prefix and has not got its answer since.
        """
        missing_of: dict[int, set[int]] = {}
        prefix = _prefix_of(wait)
        given_up = [each for each in self._given_up.values() if _prefix_of(each) == prefix]
        for each in [*self._all_waits(), *given_up]:
            missing = each.missing - self._values.get(each.key, {}).keys()
            missing_of.setdefault(each.rank, set()).update(missing)
        silent: set[int] = set()
        seen: set[int] = set()
        todo = list(wait.missing)
        while todo:
            rank = todo.pop()
            if rank in seen:
                continue
            seen.add(rank)
            if causes := missing_of.get(rank):
                todo += causes
            else:
                silent.add(rank)
        return sorted(silent or wait.missing)

    # --- failures ---

    def _claim(self, rank: int, facts: dict[str, Any], value: bytes, now: float) -> list[Reply]:
        """The first member that claims to have failed first is told so, and all others learn of it."""
        session = _session_of(facts)
        is_first = session not in self._claimed
        line = self._claimed.setdefault(session, encode("claimed", rank=rank, session=session))
        return [Reply(range(self.world_size) if is_first else [rank], line)]

    def _fail(self, rank: int, facts: dict[str, Any], value: bytes, now: float) -> list[Reply]:
        """End the other members of a session, or of all (0), with the exit code of the first that asks."""
        code, session = facts["code"], _session_of(facts)
        if type(code) is not int or not 0 < code <= _LARGEST_CODE:
            raise ValueError("not the code of a failure")
        if session in self._failed:
            return []
        line = self._failed[session] = encode("failed", code=code, session=session)
        return [Reply([each for each in range(self.world_size) if each != rank], line)]


def _no_answer(missing: Sequence[int], **of: str | int) -> bytes:
    facts: dict[str, object] = {"missing": missing, **of}
    return encode("no_answer", b"", **facts)


def _key_of(facts: dict[str, Any]) -> str:
    key = facts["key"]
    if type(key) is not str or not 0 < len(key) <= _LONGEST_KEY:
        raise ValueError("not a key")
    return key


def _prefix_of(wait: _Wait) -> str:
    return wait.key.rpartition("/")[0]


def _session_of(facts: dict[str, Any]) -> int:
    session = facts["session"]
    if type(session) is not int or session < 0:
        raise ValueError("not a session")
    return session


def _timeout_of(facts: dict[str, Any]) -> float:
    """The seconds that a member waits; infinite for None."""
    timeout_s = facts["timeout_s"]
    if timeout_s is None:
        return _NEVER
    if not isinstance(timeout_s, (int, float)) or not timeout_s >= 0:  # refuses NaN too
        raise ValueError("not a time")
    return float(timeout_s)
