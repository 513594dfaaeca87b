"""A process's connection to the server of its job: `mpiddp.protocol.channel` has the messages.

    channel = connect(server, world, wakes)
    threading.Thread(target=act_on, args=(channel.news(),), daemon=True).start()
    hosts = channel.gather("hosts", socket.gethostname(), timeout_s=60)

One thread reads the connection, by iterating over the news. Any thread may ask: it waits until the reading
thread has its answer. The server alone decides that a wait has lasted too long, so that a launcher which is
stopped (Ctrl-Z) ends none.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any

from mpiddp.errors import JobFailed
from mpiddp.protocol.channel import CHILD, RANK, decode, encode, encode_value, unlisted
from mpiddp.runtime.job.connect import NO_MESSAGE, Server, connect_to_launcher
from mpiddp.world import World

_ANSWERS = frozenset({"gathered", "collected", "no_answer", "entered"})
WHOLE_JOB = 0  # the stay of a failure that ends the ranks of all stays


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
        self._has_arrived = threading.Event()

    def arrive(self, value: bytes = b"", error: Exception | None = None) -> None:
        self.value, self.error = value, error
        self._has_arrived.set()

    def wait(self) -> bytes:
        self._has_arrived.wait()
        if self.error is not None:
            raise self.error
        return self.value


class JobChannel:
    """The connection of one process, which the server has accepted. `connect` makes it.

    A process may enter the job several times, see `Coordinator.begin_stay`. A failure ends the ranks of one
    stay, or all of them.

    Args:
        introduced: the connection, and what the server sends over it from now on.
        wakes: gets an item whenever there is news about the other ranks.
    """

    def __init__(
        self,
        server: Server,
        introduced: tuple[socket.socket, Iterator[bytes]],
        world: World,
        wakes: SimpleQueue[None],
        role: str,
    ) -> None:
        self.server = server
        self.rank = world.rank
        self.world_size = world.world_size
        self.connection, self._lines = introduced
        self.group = 0  # of the ranks, else the number that `enter` has returned
        self.is_lost = False  # the server has ended, or has lost rank 0
        self.was_closed_here = False  # by a script that closes all files, as daemons do
        self._world = world
        self._role = role
        self._identity = identity(self.connection.fileno())
        self._wakes = wakes
        # A handler of a signal may call os._exit, which leaves the job first.
        self._send_lock = threading.RLock()
        self._lock = threading.RLock()  # of what follows
        self._answers: dict[str | int, _Answer] = {}  # by key of a gather, or number of a request
        self._given: dict[
            str, list[Any] | None
        ] = {}  # by key: the values of all, once they are there
        self._called: set[str] = set()  # keys of gathers that this process is called to
        self._first_failures: dict[int, int] = {}  # by stay: the rank that has claimed it
        self._claims: dict[int, _Answer] = {}  # by stay
        self._codes: dict[int, int] = {}  # by stay: the exit code of the rank that has failed
        self._numbers = itertools.count(1)
        self.on_closed: Callable[[], object] = lambda: None  # called once the script has closed it
        # A forked child that keeps the connection open would hide the death of this rank.
        os.register_at_fork(after_in_child=self._close_in_child)

    def send(self, kind: str, value: bytes = b"", **facts: object) -> None:
        """Send a message. A lost connection is left to the reading thread."""
        with contextlib.suppress(OSError):
            self._send(encode(kind, value, **facts))

    def _send(self, line: bytes) -> None:
        with self._send_lock:
            self._ensure_open()
            self.connection.sendall(line)

    def _ensure_open(self) -> None:
        if not self.was_closed_here and identity(self.connection.fileno()) != self._identity:
            self._connect_again()

    def _connect_again(self) -> None:
        """The script has closed all files (`os.closerange`), and may have others by their numbers.

        The rank can report its end over another connection. It reads no news there.
        """
        self.was_closed_here = True
        self.on_closed()
        self.connection.detach()  # its number may be another file's
        if self._role == CHILD:  # which reports to nobody
            return
        facts = {"role": self._role, "again": True}
        with contextlib.suppress(JobFailed):
            self.connection, _ = connect_to_launcher(self.server, self._world, "hello", **facts)

    @contextlib.contextmanager
    def kept_by_exec(self) -> Iterator[None]:
        """Within the body, a program that takes this process's place keeps the connection open."""
        with self._send_lock:
            self._ensure_open()
        file = self.connection.fileno()
        with contextlib.suppress(OSError):  # there is none any more
            os.set_inheritable(file, True)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                os.set_inheritable(file, False)

    def _close_in_child(self) -> None:
        if self.was_closed_here or identity(self.connection.fileno()) == self._identity:
            self.connection.close()
        else:  # its number may be another file's
            self.connection.detach()
        self.is_lost = self.was_closed_here = True  # a child does not connect again: it is no rank

    # --- what the ranks agree on ---

    def enter(self) -> int:
        """Join the n-th children of the other ranks as this rank's n-th child, and return n."""
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
        unless_failed: int | None = None,
        or_gone: bool = False,
    ) -> list[Any]:
        """The values that these ranks have put under the key, once all have.

        Args:
            unless_failed: a stay.
            or_gone: the value of a rank whose connection has ended is None.

        Raises:
            Silent: some rank is the cause that a value is not there in time.
            AnotherFailed: a rank of the stay has failed, maybe this one.
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

    def claim_first_failure(self, stay: int) -> bool:
        """Whether this rank is the first to fail in the stay.

        Raises:
            ChannelLost: the server has ended.
        """
        if stay not in self._first_failures:
            with self._lock:
                answer = self._claims.setdefault(stay, _Answer())
                if self.is_lost:
                    raise self._lost()
            self._send_or_lose("claim", stay=stay)
            answer.wait()
        return self._first_failures[stay] == self.rank

    def fail(self, code: int, stay: int) -> None:
        """End the other ranks of the stay with this exit code, unless another one has. Does not wait."""
        self.send("fail", code=code, stay=stay)

    def code_of_failure(self, stay: int) -> int:
        """The exit code of the rank whose failure ends the ranks of this stay, 0 if none has failed."""
        return self._codes.get(stay, 0)

    def leave(self, *, is_over: bool) -> None:
        """Tell the server whether the end of this connection is no failure. Does not wait."""
        if self.group == 0:  # that of a child never is one
            self.send("leave", is_over=is_over)

    def _ask(
        self,
        kind: str,
        awaited: str | int,
        value: bytes = b"",
        *,
        unless_failed: int | None = None,
        **facts: object,
    ) -> bytes:
        answer = _Answer(ends_with_failure=unless_failed is not None)
        with self._lock:
            if self.is_lost:
                raise self._lost()
            if unless_failed in self._first_failures:
                raise AnotherFailed
            self._answers[awaited] = answer
        try:
            self._send_or_lose(kind, value, **facts)
            return answer.wait()
        finally:
            with self._lock:
                self._answers.pop(awaited, None)

    def _send_or_lose(self, kind: str, value: bytes = b"", **facts: object) -> None:
        """Send a message that has an answer. Raises ChannelLost if none can come."""
        try:
            self._send(encode(kind, value, **facts))
        except OSError:
            raise self._lost() from None

    def _lost(self) -> ChannelLost:
        return ChannelLost(f"rank {self.rank} has lost the connection to the other ranks.")

    # --- what arrives ---

    def listen(self) -> None:
        """Read until the connection ends, where no launcher sends messages of its own."""
        for _ in self.news():
            pass

    def news(self) -> Iterator[dict[str, Any]]:
        """What the launcher tells this process, until the connection ends. One thread may read it."""
        try:
            # Whoever sends anything but messages is not the server.
            for line in self._lines:
                facts, value = decode(line)
                if not self._take(facts, value):
                    yield facts
        except OSError as error:
            if error.errno == errno.EBADF:
                with self._send_lock:
                    if not self.was_closed_here:
                        self._connect_again()
        except NO_MESSAGE:
            pass
        finally:
            self._lose()

    def _take(self, facts: dict[str, Any], value: bytes) -> bool:
        """Note what the other ranks have done, and give answers to those who wait. False for other news."""
        kind = facts["type"]
        if kind in _ANSWERS:
            self._answer(facts, value)
        elif kind == "claimed":
            self._note_first_failure(facts["stay"], facts["rank"])
        elif kind == "failed":
            self._codes[facts["stay"]] = facts["code"]
        elif kind == "called":
            self._called.add(facts["key"])
        elif kind == "lost":
            self.is_lost = True
        else:
            return False
        self._wakes.put(None)
        return True

    def _answer(self, facts: dict[str, Any], value: bytes) -> None:
        if facts["type"] == "entered":
            awaited, value = "entered", str(facts["number"]).encode()
        else:
            awaited = facts["key"] if "key" in facts else facts["number"]
        with self._lock:
            answer = self._answers.pop(awaited, None)
            if awaited in self._given and value:
                self._given[awaited] = unlisted(value, self.world_size)
        if answer is not None:
            no_answer = facts["type"] == "no_answer"
            answer.arrive(value, Silent(facts["missing"]) if no_answer else None)

    def _note_first_failure(self, stay: int, rank: int) -> None:
        with self._lock:
            self._first_failures[stay] = rank
            claim = self._claims.get(stay)
            waiting = [each for each in self._answers.values() if each.ends_with_failure]
        if claim is not None:
            claim.arrive()
        for each in waiting:
            each.arrive(error=AnotherFailed())

    def _lose(self) -> None:
        with self._lock:
            self.is_lost = True
            waiting = [*self._answers.values(), *self._claims.values()]
        for answer in waiting:
            answer.arrive(error=self._lost())
        self._wakes.put(None)


def identity(file: int) -> tuple[int, int] | None:
    """What distinguishes an open file from another one with its number; None once it is closed."""
    try:
        status = os.fstat(file)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def connect(
    server: Server, world: World, wakes: SimpleQueue[None], *, role: str = RANK
) -> JobChannel:
    """Connect to the launcher.

    Raises:
        AnotherScript: this rank has a script already.
        JobFailed: the launcher cannot be reached.
    """
    introduced = connect_to_launcher(server, world, "hello", role=role)
    return JobChannel(server, introduced, world, wakes, role)
