"""A process's connection to the server of its job: `mpiddp.protocol.channel` has the messages.

    channel = JobChannel(server, world)
    channel.listen(act_on)                    # in a thread; a rank's agent calls `receive` in its own loop
    hosts = channel.gather("hosts", socket.gethostname(), timeout_s=60)

Any thread may ask: it waits until its answer has been received. The server alone decides that a wait has
lasted too long, so that a launcher which is stopped (Ctrl-Z) ends none.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mpiddp.errors import JobFailed
from mpiddp.protocol.channel import (
    CHUNK,
    RANK,
    VALUE_LIMIT,
    Lines,
    decode,
    encode,
    encode_value,
    introduction,
    unlisted,
)
from mpiddp.protocol.messages import UNIX, UNPROVED_LINE_LIMIT, notice_silence
from mpiddp.world import World

CONNECT_TIMEOUT_S = 30.0  # in which no connection to the server stands
_ATTEMPT_S, _RETRY_S = 10.0, 0.2
# The errors of a line that is not a message, and of an address that is none.
_NO_MESSAGE = (ValueError, LookupError, TypeError, RecursionError, OverflowError)
_LONGEST = 16 * VALUE_LIMIT  # bytes of an answer, which has a value of every rank
_ANSWERS = ("gathered", "no_answer", "claimed", "function", "answer")


class Server(NamedTuple):
    """Where the server listens, "host:port" or "unix:path", and the key that its members share with it."""

    address: str
    key: str


class AnotherScript(Exception):
    """Another process of this rank is its script."""


class ChannelLost(JobFailed):
    """The connection to the server has ended."""


class Silent(Exception):
    """Some ranks, a list of them, did not answer in time."""


class AnotherFailed(Exception):
    """A rank has failed, which ends the job, so no answer may come."""


class JobChannel:
    """The connection of one process. The arguments and errors are those of `connect_to_server`.

    Attributes:
        group: of the ranks, 0, or of their n-th scripts, n.
        code_of_failure: the exit code of the rank whose failure ends this one, 0 if none has failed.
        is_lost: the server has ended, or has lost rank 0.
        on_news: gets the messages that nobody waits for.
    """

    def __init__(
        self,
        server: Server,
        world: World,
        role: str = RANK,
        *,
        answer_in_s: float | None = None,
    ) -> None:
        self.connection, self.group = connect_to_server(
            server, world, "hello", role=role, answer_in_s=answer_in_s
        )
        self.server = server
        self.rank, self.world_size = world.rank, world.world_size
        self._lines = Lines(_LONGEST)
        self.code_of_failure = 0
        self.is_lost = self._has_ended = False
        self.on_news: Callable[[dict[str, Any]], object] = lambda facts: None
        self._look: Callable[[], object] = lambda: None
        self._thread: threading.Thread | None = None
        self._wake, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._send_lock = threading.RLock()  # a handler of a signal may send while its thread does
        self._changed = threading.Condition()  # of what follows
        # The answers, by the key of a gather or a claim, or by their type; and the values that they bring.
        self._arrived: dict[str, tuple[dict[str, Any], bytes]] = {}
        self._called: set[str] = set()  # keys of gathers that this process is called to
        self._claim_key = "first failure"
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
        answer = self._arrived.get(key)
        return None if answer is None else unlisted(answer[1], self.world_size)

    def is_called(self, key: str) -> bool:
        """Whether another rank calls all ranks to give a value under this key."""
        return key in self._called

    def claim_first_failure(self) -> bool:
        """Whether this rank is the first to fail. If the server has ended, only rank 0 counts as the first.

        Call this as soon as an error is caught: the unwinding breaks connections, and the other ranks then
        fail as well.
        """
        key = self._claim_key
        if key not in self._arrived:
            try:
                self.ask("claim", key=key)
            except ChannelLost:
                return self.rank == 0
        return bool(self._arrived[key][0]["rank"] == self.rank)

    def begin_session(self) -> None:
        """The ranks form another process group: the script has caught the error that ended the last one."""
        self._claim_key += "+"

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
        key: str = "",
        unless_failed: bool = False,
        **facts: object,
    ) -> tuple[dict[str, Any], bytes]:
        """Send a message, and return its answer, which has its key, or else its type.

        Raises:
            AnotherFailed: with `unless_failed`, a rank has failed, maybe this one.
            ChannelLost: the server has ended.
        """
        self._check(self.is_lost, unless_failed)
        try:
            self._send(kind, value, {"key": key, **facts} if key else facts)
        except OSError:
            raise self.lost() from None
        key = key or kind
        with self._changed:
            while key not in self._arrived:
                self._check(self._has_ended, unless_failed)
                if self._thread is not None:
                    self._changed.wait()
                else:
                    for news in self.receive():
                        self.on_news(news)
            # Two threads may claim at once, and wait for one answer.
            return self._arrived[key] if kind == "claim" else self._arrived.pop(key)

    def _check(self, is_lost: bool, unless_failed: bool) -> None:
        if is_lost:
            raise self.lost()
        if unless_failed and self._claim_key in self._arrived:
            raise AnotherFailed

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
        except (OSError, *_NO_MESSAGE):  # it has ended, or the script has closed it
            self._lose()
        return news

    def _take(self, facts: dict[str, Any], value: bytes) -> bool:
        """Note what the other ranks have done, and the answers to those who wait. False for other news."""
        kind = facts["type"]
        with self._changed:
            if kind in _ANSWERS:
                self._arrived[facts.get("key", kind)] = facts, value
            elif kind == "called":
                self._called.add(facts["key"])
            elif kind == "failed":
                self.code_of_failure = facts["code"]
            elif kind == "lost":
                self.is_lost = True
            else:
                return False
            self._changed.notify_all()
        return True

    def _lose(self) -> None:
        with self._changed:
            self.is_lost = self._has_ended = True
            self._changed.notify_all()


# --- connecting, with proofs on both sides: see `mpiddp.protocol.channel` ---


def connect_to_server(
    server: Server,
    world: World,
    kind: str,
    *,
    answer_in_s: float | None = None,
    **facts: object,
) -> tuple[socket.socket, int]:
    """Connect, and introduce this rank by a message of this kind.

    A launcher that is stopped (Ctrl-Z) answers late: its kernel accepts the connection. So there is no limit
    while a connection stands, which ends with the launcher or its host. A running launcher limits the start.

    Args:
        answer_in_s: the time in which the server beside rank 0 answers, None for the launcher.

    Returns:
        The connection, and the group of the member: 0 of the ranks, n of their n-th scripts.

    Raises:
        AnotherScript: this rank has a script already.
        JobFailed: the server cannot be reached.
    """
    deadline = time.monotonic() + (answer_in_s or CONNECT_TIMEOUT_S)
    while True:
        try:
            return _connect(server, world.rank, kind, facts, answer_in_s)
        except OSError as error:
            # Strangers may hold all connections.
            if not isinstance(error, ConnectionRefusedError) and time.monotonic() < deadline:
                time.sleep(_RETRY_S)
                continue
            why = str(error)
        except _NO_MESSAGE:  # another program listens there, or the server of another job
            why = "it is not the server of this job"
        break
    name = "the launcher" if answer_in_s is None else "rank 0's channel"
    host, _, port = server.address.rpartition(":")
    is_path = server.address.startswith(UNIX)
    where = f"on {server.address}" if is_path else f"at {host} port {port}"
    raise JobFailed(
        f"rank {world.rank} on {world.hostname} cannot reach {name} {where} ({why}). "
        "Check that it is running and that no firewall blocks the port."
    )


def _connect(
    server: Server, rank: int, kind: str, facts: Mapping[str, object], answer_in_s: float | None
) -> tuple[socket.socket, int]:
    """Prove that this process is of the job, and check that the server is."""
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(_connected(server))
        connection.settimeout(answer_in_s)
        challenge = _next(connection)["challenge"]
        line, expected_proof = introduction(server.key, challenge, kind, rank, facts)
        connection.sendall(line)
        answer = _next(connection)
        if answer["type"] == "taken":
            raise AnotherScript
        if answer["type"] != "received" or answer["proof"] != expected_proof:
            raise ValueError("no proof")
        connection.settimeout(None)
        stack.pop_all()
        return connection, answer.get("group", 0)


def _connected(server: Server) -> socket.socket:
    if server.address.startswith(UNIX):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(_ATTEMPT_S)
        connection.connect(server.address.removeprefix(UNIX))
    else:
        host, _, port = server.address.rpartition(":")
        connection = socket.create_connection((host, int(port)), timeout=_ATTEMPT_S)
    notice_silence(connection)
    return connection


def _next(connection: socket.socket) -> dict[str, Any]:
    """The next message. What follows it is left to the connection's owner."""
    with connection.makefile("rb", buffering=0) as bytes_of_it:
        line = bytes_of_it.readline(UNPROVED_LINE_LIMIT)
    if not line.endswith(b"\n"):
        raise ConnectionResetError("the connection has ended")
    return decode(line[:-1])[0]
