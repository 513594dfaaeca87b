"""The connections of a job's channel, and the agreements of the members of a group over them.

Nothing here waits: bytes that a connection does not take yet are queued, and a time limit is a timer.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mpiddp.protocol import channel
from mpiddp.protocol.channel import Lines, Seals, encode

_LONGEST_WAIT_S = 86400.0  # epoll accepts at most a few weeks


class TimedSelector(selectors.DefaultSelector):
    """A selector with timers. Times are time.monotonic()'s seconds.

    Handle the files before the timers: after Ctrl-Z and `fg`, all timers are due, but the ranks have run on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.timers: dict[Any, float] = {}  # the events, with the times when they are due

    def after(self, seconds: float, event: object) -> None:
        """Let `due` return `event` after so many seconds. This replaces an earlier timer of the event."""
        self.timers[event] = time.monotonic() + seconds

    def cancel(self, *events: object) -> None:
        for event in events:
            self.timers.pop(event, None)

    @property
    def next_at(self) -> float:
        """The time of the next timer, infinity if there is none."""
        return min(self.timers.values(), default=float("inf"))

    def ready(self, until: float = float("inf")) -> list[Any]:
        """Wait for files and timers, at most until then. Returns the data of the files that are ready."""
        wait_s = min(until, self.next_at) - time.monotonic()
        return [key.data for key, _ in self.select(min(max(0.0, wait_s), _LONGEST_WAIT_S))]

    def due(self) -> Iterator[Any]:
        """The events that are due, in the order of their times."""
        while self.next_at <= time.monotonic():
            event = min(self.timers, key=self.timers.__getitem__)
            del self.timers[event]
            yield event


@dataclass(eq=False, slots=True)
class Peer:
    """A connection, which the selector reports with this object as its data.

    `rank` is None until the peer has proved that it belongs to the job. `group` is 0 for a rank, and n for its n-th
    script. A peer that stops reading is disconnected once its queue exceeds twice the limit of a line.
    """

    connection: socket.socket
    selector: selectors.BaseSelector
    challenge: str = field(default_factory=lambda: os.urandom(16).hex())
    lines: Lines = field(default_factory=lambda: Lines(channel.UNPROVED_LINE_LIMIT))
    rank: int | None = None
    group: int = 0
    seals: Seals | None = None  # of the lines of a member
    _unsent: list[bytes | memoryview] = field(default_factory=list)  # seldom more than one
    _is_written: bool = False  # whether the selector reports that the connection takes more

    def send(self, line: bytes, value: bytes = b"", digest: bytes = b"") -> None:
        """Send as much as the connection takes of a line and its value. The rest follows when it takes more.

        `line` is of `encode`, without a value, and `digest` is that of the value.
        """
        is_idle, parts = not self._unsent, [line]
        if self.seals is not None:
            parts.insert(0, self.seals.of_server.next(line[:-1], digest))
        if value:
            parts = [*parts[:-1], line[:-1], b"\t", value, b"\n"]
        self._unsent += [b"".join(parts)] if len(value) < channel.CHUNK else parts
        if sum(map(len, self._unsent)) > 2 * self.lines.limit:
            self._unsent.clear()
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)  # the next read loses it
        elif is_idle:
            self.flush()

    def flush(self) -> None:
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
    expire: Callable[[], None]  # the event of its time limit
    or_lost: bool  # whether a member that is lost gives null
    values: dict[int, bytes]  # by rank


class Claims:
    """The register of who has failed first, for one group or for several that share it."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.lines: dict[str, bytes] = {}  # the answers, by the keys of the claims

    def claim(self, group: Group, rank: int, facts: Mapping[str, Any]) -> None:
        """The first member that makes this claim is told so, and all others learn of it."""
        key = facts["key"]
        if key in self.lines:
            group.tell([rank], self.lines[key])
            return
        self.lines[key] = encode("claimed", rank=rank, key=key, like=facts.get("like", ""))
        for each in self.groups:
            each.tell(each.members, self.lines[key])


class Group:
    """The agreements of the members [0, world_size). `members` has those that are connected, by rank."""

    def __init__(
        self, world_size: int, selector: TimedSelector, claims: Claims | None = None
    ) -> None:
        self.world_size, self._timers = world_size, selector.timers
        self.members: dict[int, Peer] = {}
        self._claims = claims or Claims()
        self._claims.groups.append(self)
        # The lines for members that enter later. The key of a gather says that it calls all members, and "" has the
        # exit code with which they end.
        self._news: dict[str, bytes] = {}
        self._gathers: dict[str, _Gather] = {}
        self._expired: dict[str, bytes] = {}  # the answers of the gathers whose time is over
        self._lost: set[int] = set()  # the members whose connection has ended

    def receive(self, rank: int, kind: str, facts: dict[str, Any], value: bytes) -> None:
        """Take a message of a member. Raises ValueError if it violates the protocol."""
        if kind == "gather":
            self._gather(rank, facts, value)
        elif kind == "claim":
            self._claims.claim(self, rank, facts)
        elif "" not in self._news:
            # End the other members with the exit code of the first that asks.
            self._news[""] = encode("failed", b"", **facts)
            self.tell(self.members.keys() - {rank}, self._news[""])

    def enter(self, rank: int) -> None:
        self._lost.discard(rank)
        for line in (*self._claims.lines.values(), *self._news.values()):
            self.tell([rank], line)

    def lose(self, rank: int) -> None:
        self._lost.add(rank)
        for key in [key for key, gather in self._gathers.items() if gather.or_lost]:
            self._gathers[key].values.setdefault(rank, b"null")
            self._complete(key)

    def _gather(self, rank: int, facts: dict[str, Any], value: bytes) -> None:
        """Take the value of a member, which gets the values of all members in the end."""
        key, timeout_s = facts["key"], facts["timeout_s"]
        if key in self._expired:
            self.tell([rank], self._expired[key])
            return
        if key not in self._gathers:
            or_lost = facts.get("or_lost") is True
            values = dict.fromkeys(self._lost, b"null") if or_lost else {}
            self._gathers[key] = _Gather(partial(self._expire, key), or_lost, values)
        gather = self._gathers[key]
        if rank in gather.values:
            raise ValueError("a second value")
        if timeout_s is not None:
            ends_at = time.monotonic() + timeout_s
            self._timers[gather.expire] = min(ends_at, self._timers.get(gather.expire, ends_at))
        gather.values[rank] = value
        if facts.get("calls") is True and key not in self._news:
            self._news[key] = encode("called", key=key)
            self.tell(self.members.keys() - gather.values.keys(), self._news[key])
        self._complete(key)

    def _complete(self, key: str) -> None:
        """Answer all members if no value is missing."""
        if len(self._gathers[key].values) == self.world_size:
            values = channel.listed(self._end(key))
            self.tell(self.members, encode("gathered", key=key), values)

    def _expire(self, key: str) -> None:
        """Tell the members that wait which ranks are missing, because the time is over."""
        values = self._end(key)
        missing = [rank for rank in range(self.world_size) if rank not in values]
        self._expired[key] = encode("no_answer", key=key, missing=missing)
        self.tell(values, self._expired[key])

    def _end(self, key: str) -> dict[int, bytes]:
        """Forget a gather. Returns its values, by rank."""
        gather = self._gathers.pop(key)
        self._timers.pop(gather.expire, None)
        self._news.pop(key, None)
        return gather.values

    def tell(self, ranks: Iterable[int], line: bytes, value: bytes = b"") -> None:
        """Send a line to the members that are connected. Its value is read once for all."""
        digest = channel.digest(value)
        for rank in ranks:
            if (member := self.members.get(rank)) is not None:
                member.send(line, value, digest)
