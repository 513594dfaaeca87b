"""What the members of one job agree on: gathers, and the first failure; and the connection of each.

The server of the job channel has one group for the ranks, and one for the n-th scripts of all ranks. Nothing
here waits: whoever owns the group calls `expire` at `next_deadline`, by its own clock, so that a server that
is stopped ends no wait.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from mpiddp.protocol.channel import RANK, VALUE_LIMIT, Lines, encode, listed
from mpiddp.protocol.messages import UNPROVED_LINE_LIMIT

KINDS = frozenset({"gather", "claim", "fail"})  # the messages that `Group.receive` takes
_NEVER = float("inf")


@dataclass(eq=False, slots=True)
class Peer:
    """A connection, which the selector reports with this object as its data. Nothing here waits for it.

    `rank` is None until it has proved that it belongs to the job. `group` is the number of its group. One
    that does not read waits for few answers, so it never has twice the `limit` to read. `may_view`: it
    is of this user, and need prove nothing to ask for one of VIEWS.
    """

    connection: socket.socket
    selector: selectors.BaseSelector
    since: float
    may_view: bool = False
    challenge: str = field(default_factory=lambda: os.urandom(16).hex())
    lines: Lines = field(default_factory=lambda: Lines(UNPROVED_LINE_LIMIT))
    rank: int | None = None
    role: str = RANK
    group: int = 0
    limit: int = VALUE_LIMIT  # bytes of a line with a value
    is_open: bool = True
    _unsent: list[bytes | memoryview] = field(default_factory=list)  # seldom more than one
    _is_written: bool = False  # the selector reports when the connection takes more

    def send(self, line: bytes) -> None:
        """Send a line, as much as the connection accepts. The rest follows when it accepts more."""
        self._unsent.append(line)
        if sum(map(len, self._unsent)) > 2 * self.limit:
            self._unsent.clear()
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)  # the next read loses it
        elif len(self._unsent) == 1:
            self.flush()

    def flush(self) -> None:
        """Send more of what has not been sent."""
        try:
            while self._unsent:
                first = self._unsent[0]
                sent = self.connection.send(first)
                if sent < len(first):
                    self._unsent[0] = memoryview(first)[sent:]
                    break
                del self._unsent[0]
        except BlockingIOError:
            pass
        except OSError:  # the next read fails too
            self._unsent.clear()
        if bool(self._unsent) is not self._is_written:
            self._is_written = not self._is_written
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._is_written else 0)
            self.selector.modify(self.connection, events, self)


@dataclass
class _Gather:
    deadline: float = _NEVER
    calls: bool = False  # the members that have not given a value yet are told
    or_gone: bool = False  # a member whose connection has ended gives null
    values: dict[int, bytes] = field(default_factory=dict)  # by rank


class Group:
    """The members [0, world_size) of one group. `members` are those that are connected, by rank."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.members: dict[int, Peer] = {}
        # The messages of the first member that has failed: by key of its claim, and to end the others.
        self._claimed: dict[str, bytes] = {}
        self._failed = b""
        self._gathers: dict[str, _Gather] = {}
        self._late: dict[str, bytes] = {}  # what those hear who come to a gather that is over
        self._gone: set[int] = set()  # members whose connection has ended

    def receive(
        self, rank: int, kind: str, facts: dict[str, Any], value: bytes, now: float
    ) -> None:
        """Take a message of a member. Raises ValueError if it violates the protocol."""
        everyone = range(self.world_size)
        if kind == "gather":
            self._gather(rank, facts, value, now)
        elif kind == "claim":
            # The first member that claims to have failed first is told so, and all others learn of it.
            is_first = facts["key"] not in self._claimed
            claimed = encode("claimed", rank=rank, key=facts["key"])
            line = self._claimed.setdefault(facts["key"], claimed)
            self._tell(everyone if is_first else [rank], line)
        elif not self._failed:
            # End the other members with the exit code of the first that asks.
            self._failed = encode("failed", code=facts["code"])
            self._tell([each for each in everyone if each != rank], self._failed)

    def enter(self, rank: int) -> None:
        """A member that enters late learns at once of failures, and of the gathers that call it."""
        self._gone.discard(rank)
        called = [encode("called", key=key) for key, each in self._gathers.items() if each.calls]
        for line in filter(None, (*self._claimed.values(), self._failed, *called)):
            self._tell([rank], line)

    def lose(self, rank: int) -> None:
        self._gone.add(rank)
        for key in [key for key, each in self._gathers.items() if each.or_gone]:
            self._gathers[key].values.setdefault(rank, b"null")
            self._complete(key)

    @property
    def next_deadline(self) -> float:
        """When to call `expire`; infinite if no member waits."""
        return min((each.deadline for each in self._gathers.values()), default=_NEVER)

    def expire(self, now: float) -> None:
        """Answer the members whose wait has lasted too long, with the ranks that are missing."""
        for key in [key for key, each in self._gathers.items() if each.deadline <= now]:
            values = self._gathers.pop(key).values
            missing = [rank for rank in range(self.world_size) if rank not in values]
            self._late[key] = encode("no_answer", key=key, missing=missing)
            self._tell(values, self._late[key])

    def _tell(self, ranks: Iterable[int], line: bytes) -> None:
        """Send members a line, which is encoded once. Those that are gone get none."""
        for rank in ranks:
            if (member := self.members.get(rank)) is not None:
                member.send(line)

    def _gather(self, rank: int, facts: dict[str, Any], value: bytes, now: float) -> None:
        """Every member gives a value, and gets those of all."""
        key, timeout_s = facts["key"], facts["timeout_s"]
        if key in self._late:
            self._tell([rank], self._late[key])
            return
        gather = self._gathers.setdefault(key, _Gather())
        if rank in gather.values:
            raise ValueError("a second value")
        gather.deadline = min(gather.deadline, _NEVER if timeout_s is None else now + timeout_s)
        gather.values[rank] = value
        if facts.get("or_gone") is True and not gather.or_gone:
            gather.or_gone = True
            gather.values |= dict.fromkeys(self._gone - gather.values.keys(), b"null")
        if facts.get("calls") is True and not gather.calls:
            gather.calls = True
            others = [each for each in range(self.world_size) if each not in gather.values]
            self._tell(others, encode("called", key=key))
        self._complete(key)

    def _complete(self, key: str) -> None:
        """Answer all, if no member is missing."""
        values = self._gathers[key].values
        if len(values) == self.world_size:
            del self._gathers[key]
            self._tell(range(self.world_size), encode("gathered", listed(values), key=key))
