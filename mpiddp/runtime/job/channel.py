"""A process's connection to the server of its job: `mpiddp.protocol.channel` has the messages.

    channel = JobChannel(server, connection, world)
    channel.listen(act_on)                    # in a thread; a rank's agent calls `receive` in its own loop
    hosts = channel.gather("hosts", socket.gethostname(), timeout_s=60)

Any thread may ask: it waits until its answer has been received. The server alone decides that a wait has
lasted too long, so that a launcher which is stopped (Ctrl-Z) ends none.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable, Sequence
from typing import Any

from mpiddp.errors import JobFailed
from mpiddp.protocol.channel import (
    CHUNK,
    VALUE_LIMIT,
    Lines,
    decode,
    encode,
    encode_value,
    unlisted,
)
from mpiddp.runtime.job.connect import NO_MESSAGE, Connection, Server
from mpiddp.world import World

_LONGEST = 16 * VALUE_LIMIT  # bytes of an answer, which has a value of every rank


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
    """What a thread waits for: a message, or an error instead of it."""

    def __init__(self, *, unless_failed: bool = False) -> None:
        self.unless_failed = unless_failed
        self.found: tuple[dict[str, Any], bytes] | Exception = {}, b""
        self.has_arrived = threading.Event()

    def arrive(self, found: tuple[dict[str, Any], bytes] | Exception) -> None:
        self.found = found
        self.has_arrived.set()


class JobChannel:
    """The connection of one process, which the server has accepted.

    Attributes:
        group: of the ranks, 0, or of their n-th scripts, n.
        code_of_failure: the exit code of the rank whose failure ends this one, 0 if none has failed.
        is_lost: the server has ended, or has lost rank 0.
        on_news: gets the messages that nobody waits for.
    """

    def __init__(self, server: Server, connection: Connection, world: World) -> None:
        self.server = server
        self.rank, self.world_size = world.rank, world.world_size
        self.group = connection.group
        self.connection = connection.socket
        self._lines = Lines(_LONGEST)
        self.code_of_failure = 0
        self.is_lost = self._has_ended = False
        self.on_news: Callable[[dict[str, Any]], object] = lambda facts: None
        self._look: Callable[[], object] = lambda: None
        self._thread: threading.Thread | None = None
        self._wake, self._waker = os.pipe()
        for end in (self._wake, self._waker):
            os.set_blocking(end, False)
        self._send_lock = threading.RLock()  # a handler of a signal may send while its thread does
        self._lock = threading.RLock()  # of what follows
        self._answers: dict[str, _Answer] = {}  # by key of a gather, or the type of the answer
        self._given: dict[str, list[Any]] = {}  # by key, the values of all
        self._called: set[str] = set()  # keys of gathers that this process is called to
        self._session = 0  # the process groups that the script has formed one after the other
        self._first_failures: dict[str, int] = {}  # by key of the claim, the rank
        os.register_at_fork(after_in_child=self.connection.close)  # it would hide this one's end

    def send(self, kind: str, value: bytes = b"", **facts: object) -> None:
        """Send a message. A lost connection is left to whoever receives."""
        with contextlib.suppress(OSError):
            self._send(kind, value, facts)

    def _send(self, kind: str, value: bytes, facts: dict[str, object]) -> None:
        line = encode(kind, value, **facts)
        with self._send_lock:
            self.connection.sendall(line)

    @property
    def has_room(self) -> bool:
        """Whether the connection takes a short message without a wait."""
        poll = select.poll()
        poll.register(self.connection, select.POLLOUT)
        return bool(poll.poll(0))

    # --- what the ranks agree on ---

    def gather(
        self,
        key: str,
        value: object,
        *,
        timeout_s: float,
        unless_failed: bool = False,
        or_gone: bool = False,
    ) -> list[Any]:
        """The values of all ranks, by rank: [world_size]. All ranks must call this with the same key.

        Args:
            or_gone: the value of a rank whose connection has ended is None.

        Raises:
            Silent: some rank did not call in time, which begins with the first rank's call.
            AnotherFailed: with `unless_failed`, a rank has failed, maybe this one.
            ChannelLost: the server has ended.
        """
        facts, values = self.ask(
            "gather",
            encode_value(value),
            answer_key=key,
            unless_failed=unless_failed,
            key=key,
            timeout_s=timeout_s,
            or_gone=or_gone,
        )
        if facts["type"] == "no_answer":
            raise Silent(facts["missing"])
        return unlisted(values, self.world_size)

    def give(self, key: str, value: object, *, calls: bool = False) -> None:
        """Give this rank's value to a gather without a time limit, and do not wait, see `given`.

        With `calls`, `is_called` becomes true on the other ranks.
        """
        self.send("gather", encode_value(value), key=key, timeout_s=None, calls=calls)

    def given(self, key: str) -> list[Any] | None:
        """The values of all ranks under this key, None until all have given theirs."""
        return self._given.get(key)

    def is_called(self, key: str) -> bool:
        """Whether another rank calls all ranks to give a value under this key."""
        return key in self._called

    def claim_first_failure(self) -> bool:
        """Whether this rank is the first to fail. If the server has ended, only rank 0 counts as the first.

        Call this as soon as an error is caught: the unwinding breaks connections, and the other ranks then
        fail as well.
        """
        key = self._claim_key
        if key not in self._first_failures:
            try:
                self.ask("claim", answer_key=key, key=key)
            except ChannelLost:
                return self.rank == 0
        return self._first_failures[key] == self.rank

    def begin_session(self) -> None:
        """The ranks form another process group: the script has caught the error that ended the last one."""
        self._session += 1

    @property
    def _claim_key(self) -> str:
        return f"first failure {self._session}"

    def fail(self, code: int) -> None:
        """End the other ranks with this exit code, unless another one has. Does not wait."""
        self.send("fail", code=code)

    def leave(self) -> None:
        """Tell the server that the end of this connection is no failure. Does not wait."""
        if self.group == 0:  # that of a script never is one
            self.send("leave")

    def ask(
        self,
        kind: str,
        value: bytes = b"",
        *,
        answer_key: str = "",
        unless_failed: bool = False,
        **facts: object,
    ) -> tuple[dict[str, Any], bytes]:
        """Send a message, and return its answer, which has this key, or else the type `kind`.

        Raises:
            AnotherFailed: with `unless_failed`, a rank has failed, maybe this one.
            ChannelLost: the server has ended.
        """
        with self._lock:
            if self.is_lost:
                raise self.lost()
            if unless_failed and self._claim_key in self._first_failures:
                raise AnotherFailed
            # Two threads may claim at once, and wait for one answer.
            waiting = _Answer(unless_failed=unless_failed)
            answer = self._answers.setdefault(answer_key or kind, waiting)
        try:
            self._send(kind, value, facts)
        except OSError:
            raise self.lost() from None
        while self._thread is None and not answer.has_arrived.is_set():
            for news in self.receive():
                self.on_news(news)
        answer.has_arrived.wait()
        if isinstance(answer.found, Exception):
            raise answer.found
        return answer.found

    def lost(self) -> ChannelLost:
        return ChannelLost(f"rank {self.rank} has lost the connection to the other ranks.")

    # --- what arrives ---

    def listen(
        self,
        on_news: Callable[[dict[str, Any]], object],
        look: Callable[[], object] = lambda: None,
    ) -> None:
        """Receive in a thread until the connection ends. `look` is called after all news and each `wake`."""
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
        while True:
            self._look()
            if self._has_ended:
                return
            ready = dict(poll.poll())
            if self._wake in ready:
                with contextlib.suppress(OSError):
                    os.read(self._wake, 4096)
            if file in ready:
                for facts in self.receive():
                    self.on_news(facts)

    def receive(self) -> list[dict[str, Any]]:
        """Receive what arrives next: note what the ranks agree on, and return the other messages."""
        news = []
        try:
            chunk = self.connection.recv(CHUNK)
            if not chunk:
                self._lose()
            for line in self._lines.split(chunk):
                facts, value = decode(line)
                if not self._take(facts, value):
                    news.append(facts)
        except (OSError, *NO_MESSAGE):  # it has ended, or the script has closed it
            self._lose()
        return news

    def _take(self, facts: dict[str, Any], value: bytes) -> bool:
        """Note what the other ranks have done, and give answers to those who wait. False for other news."""
        kind, key = facts["type"], facts.get("key", "")
        with self._lock:
            if kind == "claimed":
                self._first_failures[key] = facts["rank"]
                for waiting in self._answers.values():
                    if waiting.unless_failed and key == self._claim_key:
                        waiting.arrive(AnotherFailed())
            elif kind == "failed":
                self.code_of_failure = facts["code"]
            elif kind == "called":
                self._called.add(key)
            elif kind == "lost":
                self.is_lost = True
            answer = self._answers.pop(key or kind, None)
            if kind == "gathered" and answer is None:
                self._given[key] = unlisted(value, self.world_size)
        if answer is not None:
            answer.arrive((facts, value))
        return answer is not None or kind in ("claimed", "failed", "called", "lost", "gathered")

    def _lose(self) -> None:
        with self._lock:
            self.is_lost = self._has_ended = True
            for answer in self._answers.values():
                answer.arrive(self.lost())
