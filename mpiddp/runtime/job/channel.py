"""A process's connection to the server of its job: `mpiddp.protocol.channel` has the messages.

    channel = JobChannel(server, accepted, world)
    channel.listen(act_on)                    # in a thread; a rank's agent calls `receive` in its own loop
    hosts = channel.gather("hosts", socket.gethostname(), timeout_s=60)

Any thread may ask: it waits until its answer has been received. The server alone decides that a wait has
lasted too long, so that a launcher which is stopped (Ctrl-Z) ends none.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from mpiddp.errors import JobFailed
from mpiddp.protocol.channel import decode, encode, encode_value, unlisted
from mpiddp.runtime.job.connect import NO_MESSAGE, Accepted, Member, Server, close_in_forks

_ANSWERS = frozenset({"gathered", "collected", "no_answer", "entered"})
_NEVER = float("inf")


class ChannelLost(JobFailed):
    """The connection to the server has ended."""


class Silent(Exception):
    """These ranks did not answer in time."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(f"no answer from ranks {', '.join(map(str, ranks))}")
        self.ranks = list(ranks)


class AnotherFailed(Exception):
    """A rank has failed, which ends the job, so no answer may come."""


class _Answer:
    """What a thread waits for. Either `value` or `error` is set when it has arrived."""

    def __init__(self, *, ends_with_failure: bool = False) -> None:
        self.value = b""
        self.error: Exception | None = None
        self.ends_with_failure = ends_with_failure
        self.has_arrived = threading.Event()

    def arrive(self, value: bytes = b"", error: Exception | None = None) -> None:
        self.value, self.error = value, error
        self.has_arrived.set()

    def result(self) -> bytes:
        if self.error is not None:
            raise self.error
        return self.value


class JobChannel:
    """The connection of one process, which the server has accepted.

    Attributes:
        code_of_failure: the exit code of the rank whose failure ends this one, 0 if none has failed.
        is_lost: the server has ended, or has lost rank 0.
        on_news: gets the messages that nobody waits for.
    """

    def __init__(self, server: Server, accepted: Accepted, member: Member) -> None:
        self.server = server
        self.rank = member.rank
        self.world_size = member.world_size
        self.connection, self._incoming, self._early = accepted
        self.group = 0  # of the ranks, else the number that `enter` has returned
        self.code_of_failure = 0
        self.is_lost = self._has_ended = False
        self.on_news: Callable[[dict[str, Any]], object] = lambda facts: None
        self._thread: threading.Thread | None = None
        self._look: Callable[[], float] = lambda: _NEVER
        self._wake, self._waker = os.pipe()
        for end in (self._wake, self._waker):
            os.set_blocking(end, False)
        self._send_lock = threading.RLock()  # a handler of a signal may send while its thread does
        self._lock = threading.RLock()  # of what follows
        self._answers: dict[str | int, _Answer] = {}  # by key of a gather, or number of a request
        # By key: the values of all, once they are there.
        self._given: dict[str, list[Any] | None] = {}
        self._called: set[str] = set()  # keys of gathers that this process is called to
        self._session = 0  # the number of the process group: an error that ends one may be caught
        self._first_failure: int | None = None  # the rank that has claimed it
        self._claim = _Answer()
        self._numbers = itertools.count(1)
        close_in_forks(self.connection)

    def send(self, kind: str, value: bytes = b"", **facts: object) -> None:
        """Send a message. A lost connection is left to whoever receives."""
        with contextlib.suppress(OSError):
            self._send(encode(kind, value, **facts))

    def _send(self, line: bytes) -> None:
        with self._send_lock:
            self.connection.sendall(line)

    # --- what the ranks agree on ---

    def enter(self) -> int:
        """Join the scripts of the other ranks, and return the number of their group."""
        self.group = int(self._ask("enter", "entered"))
        return self.group

    def gather(self, key: str, value: object, *, timeout_s: float) -> list[Any]:
        """The values of all ranks, by rank: [world_size]. All ranks must call this with the same key.

        Args:
            value: JSON.

        Raises:
            Silent: some rank did not call in time, which begins with the first rank's call.
            ChannelLost: the server has ended.
        """
        own = encode_value(value)
        answer = self._ask("gather", key, own, key=key, timeout_s=timeout_s)
        return unlisted(answer, self.world_size)

    def give(self, key: str, value: object, *, calls: bool) -> None:
        """Give this rank's value to a gather without a time limit, and do not wait, see `given`.

        Args:
            calls: let `is_called` be true on the other ranks.
        """
        with self._lock:
            self._given[key] = None
        self.send("gather", encode_value(value), key=key, timeout_s=None, calls=calls)

    def given(self, key: str) -> list[Any] | None:
        """The values of all ranks under this key, None until all have given theirs."""
        return self._given.get(key)

    def is_called(self, key: str) -> bool:
        """Whether another rank calls all ranks to give a value under this key."""
        return key in self._called

    def put(self, key: str, value: object) -> None:
        """Let the other ranks collect a value of JSON. Does not wait."""
        self.send("put", encode_value(value), key=key)

    def collect(
        self,
        key: str,
        ranks: Sequence[int],
        *,
        timeout_s: float,
        unless_failed: bool = False,
        or_gone: bool = False,
    ) -> list[Any]:
        """The values that these ranks have put under the key, once all have.

        Args:
            or_gone: the value of a rank whose connection has ended is None.

        Raises:
            Silent: some rank is the cause that a value is not there in time.
            AnotherFailed: with `unless_failed`, a rank has failed, maybe this one.
            ChannelLost: the server has ended.
        """
        number = next(self._numbers)
        answer = self._ask(
            *("collect", number),
            unless_failed=unless_failed,
            number=number,
            key=key,
            ranks=list(ranks),
            timeout_s=timeout_s,
            or_gone=or_gone,
        )
        values: list[Any] = json.loads(answer)
        return values

    def forget(self, prefix: str) -> None:
        """Forget what this rank has put under keys with this prefix. Does not wait."""
        self.send("forget", key=prefix)

    def claim_first_failure(self) -> bool:
        """Whether this rank is the first to fail.

        Raises:
            ChannelLost: the server has ended.
        """
        if self._first_failure is None:
            with self._lock:
                if self.is_lost:
                    raise self._lost()
            self._send_or_lose("claim", session=self._session)
            self._wait(self._claim)
        return self._first_failure == self.rank

    def begin_session(self) -> None:
        """The ranks form another process group: the script has caught the error that ended the last one."""
        with self._lock:
            self._session += 1
            self._first_failure, self._claim = None, _Answer()

    def fail(self, code: int) -> None:
        """End the other ranks with this exit code, unless another one has. Does not wait."""
        self.send("fail", code=code, session=0)

    def leave(self) -> None:
        """Tell the server that the end of this connection is no failure. Does not wait."""
        if self.group == 0:  # that of a script never is one
            self.send("leave", is_over=True)

    def _ask(
        self,
        kind: str,
        answer_key: str | int,
        value: bytes = b"",
        *,
        unless_failed: bool = False,
        **facts: object,
    ) -> bytes:
        answer = _Answer(ends_with_failure=unless_failed)
        with self._lock:
            if self.is_lost:
                raise self._lost()
            if unless_failed and self._first_failure is not None:
                raise AnotherFailed
            self._answers[answer_key] = answer
        try:
            self._send_or_lose(kind, value, **facts)
            return self._wait(answer)
        finally:
            with self._lock:
                self._answers.pop(answer_key, None)

    def _wait(self, answer: _Answer) -> bytes:
        if self._thread is None:
            while not answer.has_arrived.is_set():
                for facts in self.receive():
                    self.on_news(facts)
        answer.has_arrived.wait()
        return answer.result()

    def _send_or_lose(self, kind: str, value: bytes = b"", **facts: object) -> None:
        """Send a message that has an answer. Raises ChannelLost if none can come."""
        try:
            self._send(encode(kind, value, **facts))
        except OSError:
            raise self._lost() from None

    def _lost(self) -> ChannelLost:
        return ChannelLost(f"rank {self.rank} has lost the connection to the other ranks.")

    # --- what arrives ---

    def listen(
        self,
        on_news: Callable[[dict[str, Any]], object],
        look: Callable[[], float] = lambda: _NEVER,
    ) -> None:
        """Receive in a thread until the connection ends.

        Args:
            on_news: gets the messages that nobody waits for.
            look: called after each message and each `wake`. It returns when to call it again, in
                time.monotonic()'s seconds.
        """
        self.on_news, self._look = on_news, look
        if self._thread is None:  # else a process group follows another one
            self._thread = threading.Thread(target=self._listen, name="mpiddp", daemon=True)
            self._thread.start()

    def wake(self) -> None:
        """Let the listening thread look. A handler of a signal may call this."""
        with contextlib.suppress(OSError):  # it is full, or the script has closed it
            os.write(self._waker, b"\n")

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        file = self.connection.fileno()
        news = self.receive() if self._early else []
        while True:
            for facts in news:
                self.on_news(facts)
            again_at = self._look()
            if self._has_ended and again_at == _NEVER:
                return
            if self._has_ended:
                with contextlib.suppress(KeyError):
                    poll.unregister(file)
            wait_s = None if again_at == _NEVER else max(0.0, again_at - time.monotonic())
            ready = dict(poll.poll(None if wait_s is None else math.ceil(1000 * wait_s)))
            if self._wake in ready:
                with contextlib.suppress(OSError):
                    os.read(self._wake, 4096)
            news = self.receive() if file in ready else []

    def receive(self) -> list[dict[str, Any]]:
        """Receive what arrives next: note what the ranks agree on, and return the other messages."""
        early, self._early = self._early, []
        try:
            return self._take_all(early or self._incoming.read())
        except (
            OSError,
            *NO_MESSAGE,
        ):  # it has ended, or was no server; the script may have closed it
            self._lose()
            return []

    def _take_all(self, lines: Sequence[bytes]) -> list[dict[str, Any]]:
        news = []
        for line in lines:
            facts, value = decode(line)
            if not self._take(facts, value):
                news.append(facts)
        return news

    def _take(self, facts: dict[str, Any], value: bytes) -> bool:
        """Note what the other ranks have done, and give answers to those who wait. False for other news."""
        kind = facts["type"]
        if kind in _ANSWERS:
            self._answer(facts, value)
        elif kind == "claimed":
            if facts["session"] == self._session:
                self._note_first_failure(facts["rank"])
        elif kind == "failed":
            self.code_of_failure = facts["code"]
        elif kind == "called":
            self._called.add(facts["key"])
        elif kind == "lost":
            self.is_lost = True
        else:
            return False
        return True

    def _answer(self, facts: dict[str, Any], value: bytes) -> None:
        if facts["type"] == "entered":
            answer_key, value = "entered", str(facts["number"]).encode()
        else:
            answer_key = facts["key"] if "key" in facts else facts["number"]
        with self._lock:
            answer = self._answers.pop(answer_key, None)
            if answer_key in self._given and value:
                self._given[answer_key] = unlisted(value, self.world_size)
        if answer is not None:
            no_answer = facts["type"] == "no_answer"
            answer.arrive(value, Silent(facts["missing"]) if no_answer else None)

    def _note_first_failure(self, rank: int) -> None:
        with self._lock:
            self._first_failure = rank
            waiting = [each for each in self._answers.values() if each.ends_with_failure]
        self._claim.arrive()
        for each in waiting:
            each.arrive(error=AnotherFailed())

    def _lose(self) -> None:
        with self._lock:
            self.is_lost = self._has_ended = True
            waiting = [*self._answers.values(), self._claim]
        for answer in waiting:
            answer.arrive(error=self._lost())
