"""The ranks of a job share one channel: they exchange values, refuse together and leave together.

    coordinator = Coordinator(world)
    coordinator.connect(world, server)  # `mpiddp.protocol.channel` has the messages
    coordinator.listen(act_on)          # in a thread; a rank's agent calls `receive` in its own loop
    hosts = coordinator.all_gather_json(socket.gethostname(), timeout_s=60)

Any thread may ask: it waits until its answer has been received. Only the server decides that a wait has
lasted too long, because a launcher that is stopped (Ctrl-Z) must end no wait.
"""

from __future__ import annotations

import contextlib
import errno
import json
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from mpiddp.errors import DONE, FAILED, JobFailed, NoAnswer, UserError, print_error
from mpiddp.protocol import channel
from mpiddp.protocol.channel import NO_MESSAGE, RANK, Seals, decode, encode
from mpiddp.runtime.job.ending import Refused, ending_of
from mpiddp.world import World

if TYPE_CHECKING:
    from mpiddp.runtime.job.connection import Server

# The values that ranks may exchange. A tuple arrives as a list.
JSON: TypeAlias = "Mapping[str, JSON] | Sequence[JSON] | str | int | float | bool | None"
Value = TypeVar("Value", bound=JSON)

AGREE_TIMEOUT_S = 30.0
GRACE_S = 1.0  # once a rank has failed, another one may end by itself in this time
_CLAIM_S = 30.0  # for the answer to a claim
LEAVE_TIMEOUT_S = 600.0  # a rank may still be busy; a rank that failed ends the others earlier
_LONGEST = 16 * channel.VALUE_LIMIT  # bytes of an answer, which has a value of every rank
CLAIM = "first failure"  # the key of a claim to have failed first
_ANSWERS = ("gathered", "no_answer", "claimed", "function", "answer")


class ChannelLost(JobFailed):
    """The connection to the server has ended."""


class AnotherFailed(Exception):
    """A rank has failed, which ends the job, so no answer may come."""


class Coordinator:
    """The ranks of `world`, as one process sees them, and its connection to the server of their job.

    Before it connects, messages are dropped.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.server: Server  # once it is connected
        self.hostnames: Sequence[str] = ()  # [world_size]; () until the ranks have met
        self.ranks_here: Sequence[int] = ()  # the ranks of this host; () until the agents have met
        self.has_launcher = False  # it is connected to a launcher, which prints why the job failed
        self.connection: socket.socket | None = None
        self._seals: Seals  # of its lines, once it is connected
        # While ranks meet over MPI, this gathers their texts in place of the server.
        self.exchange: Callable[[str], list[str]] | None = None
        self.group = 0  # 0 is the group of the ranks, and n that of their n-th scripts
        self.code_of_failure = 0  # the exit code of the rank whose failure ends this one
        self.lost_rank: int | None = None  # the rank that has failed, if it has not said so itself
        self.is_lost = False  # the server has ended, so nothing more arrives
        self._early: list[dict[str, Any]] = []  # messages that came before `listen`
        # Gets the messages that are no answers.
        self.on_news: Callable[[dict[str, Any]], object] = self._early.append
        self._listens = False  # a thread receives
        self._round = 0
        self._lines = channel.Lines(_LONGEST)
        self._unsent = deque[tuple[str, bytes, dict[str, object]]]()
        self._send_lock = threading.RLock()
        self._sender = 0  # the thread that sends
        self._changed = threading.Condition()  # an answer has arrived, or the server is lost
        # The answers with their values, by the key of a gather or a claim, otherwise by their type.
        self._arrived: dict[str, tuple[dict[str, Any], bytes]] = {}

    def connect(
        self, world: World, server: Server, role: str = RANK, answer_s: float | None = None
    ) -> None:
        """Connect as this rank of `world`, or as its script. Raises as `connect_to_server`."""
        from mpiddp.runtime.job.connection import connect_to_server

        member = connect_to_server(server, world, "hello", role=role, answer_s=answer_s)
        self.connection, self.group, self._seals = member
        self.world, self.server, self.has_launcher = world, server, server.is_launcher

    def forget(self) -> None:
        """Close a forked child's copy of the connection, which would hide the end of this process."""
        if self.connection is not None:
            self.connection.close()
        self.connection, self.has_launcher = None, False
        self.world, self.hostnames = World(0, 1, 0, 1), ()

    def send(self, kind: str, value: bytes = b"", /, **facts: object) -> None:
        """Send a message. A lost connection is left to whoever receives."""
        if self.connection is None:
            return
        self._unsent.append((kind, value, facts))
        try:
            # The seals count the lines. So a signal's handler that interrupts its thread here leaves its
            # message to that thread. If the inner loop was at its end, the outer loop sees it.
            while self._unsent and self._sender != threading.get_ident():
                with self._send_lock:
                    self._sender = threading.get_ident()
                    try:
                        while self._unsent:
                            kind, value, facts = self._unsent.popleft()
                            line = encode(kind, value, self._seals.of_member, **facts)
                            self.connection.sendall(line)
                    finally:
                        self._sender = 0
        except OSError as error:
            # The script has closed it, and may have opened another file.
            self.is_lost |= error.errno in (errno.EBADF, errno.ENOTSOCK)

    def tell_launcher(self, kind: str, **facts: object) -> None:
        if self.has_launcher:
            self.send(kind, b"", **facts)

    @property
    def has_room(self) -> bool:
        """Whether the connection takes a short message without a wait."""
        poll = select.poll()
        if self.connection is not None:
            poll.register(self.connection, select.POLLOUT)
        return bool(poll.poll(0))

    def all_gather_json(
        self, value: Value, *, timeout_s: float | None, key: str = ""
    ) -> list[Value]:
        """The values of all ranks, by rank: [world_size]. All ranks must call this.

        One that goes on beside others, in a thread, has a `key`, and no value is None. The failure or the
        loss of any rank ends it. Raises NoAnswer, which names the ranks that did not call within `timeout_s`
        of the first, and as `ask` does.
        """
        text = json.dumps(value)
        if self.exchange is not None or self.world.world_size == 1:
            texts = [text] if self.exchange is None else self.exchange(text)
            return [json.loads(text) for text in texts]
        options: dict[str, Any] = {
            "key": key or self.unique_prefix("exchange"),
            "timeout_s": timeout_s,
            "or_lost": bool(key),
        }
        answer = self.ask("gather", text.encode(), unless_failed=bool(key), **options)
        values = self._values(*answer, timeout_s)
        if key and None in values:  # a rank that was killed cannot claim that it has failed
            raise AnotherFailed
        return values

    def _values(
        self, facts: Mapping[str, Any], values: bytes, timeout_s: float | None
    ) -> list[Any]:
        if facts["type"] == "no_answer":
            names = ", ".join(map(self.name, facts["missing"]))
            raise NoAnswer(f"{names} did not answer in {timeout_s:g} s.")
        return channel.unlisted(values, self.world.world_size)

    def unique_prefix(self, name: str) -> str:
        """A new prefix for keys, the same on every rank. All ranks must call this."""
        self._round += 1
        return f"{name}/{self._round}"

    def give(
        self, key: str, value: Any, timeout_s: float | None = None, *, calls: bool = True
    ) -> None:
        """Give this rank's value, and do not wait, see `given`.

        With `calls`, the news "called" calls the others to it, and a lost rank gives None.
        """
        options: dict[str, Any] = {
            "key": key,
            "timeout_s": timeout_s,
            "calls": calls,
            "or_lost": calls,
        }
        self.send("gather", json.dumps(value).encode(), **options)

    def given(self, key: str, timeout_s: float = 0.0) -> list[Any] | None:
        """The values of all ranks; None until the others have given theirs. Raises NoAnswer."""
        answer = self._arrived.get(key)
        return None if answer is None else self._values(*answer, timeout_s)

    @contextlib.contextmanager
    def all_or_none(self, *, timeout_s: float | None = 600.0, exits: bool = True) -> Iterator[None]:
        """Run the body on every rank; it succeeds on all ranks or on none.

        If any rank raises a `UserError` or a `JobFailed`, the launcher prints it, or else rank 0, and every
        rank exits, with code 2 or 1. Without `exits` all ranks raise it, because a script may catch it and
        continue. A `NoAnswer` is raised at once: the missing rank would be missing here as well.
        """
        ending = ending_of(None)
        try:
            yield
        except NoAnswer:
            raise
        except (UserError, JobFailed) as error:
            ending = ending_of(error)
        answers = self.all_gather_json((ending.error, ending.code), timeout_s=timeout_s)
        codes = [code for _, code in answers if code != DONE]
        if not codes:
            return
        code = min(codes)  # a failure of a machine may cause what looks like bad input
        text = "\n".join(self.sentences([problem for problem, _ in answers]))
        if not exits:
            raise (JobFailed if code == FAILED else UserError)(text) from None
        if self.world.rank == 0 and not self.has_launcher:
            print_error(text)  # a script's logging.config may have switched the log off
        # The first rank to exit makes mpirun kill rank 0, even in the middle of its sentence.
        self.leave(waits=True)
        raise Refused(code, text if self.has_launcher else "")

    def name(self, rank: int) -> str:
        return f"rank {rank} on {self.hostnames[rank]}" if self.hostnames else f"rank {rank}"

    def sentences(self, problems: list[str]) -> list[str]:
        """Each distinct problem once: bare if all ranks have it, else after the name of the first rank."""
        if len(set(problems)) == 1:
            return problems[:1]
        first_rank = {problem: problems.index(problem) for problem in problems if problem}
        return [f"{self.name(rank)}: {problem}" for problem, rank in first_rank.items()]

    def different(self, values: Sequence[str]) -> str:
        """The values of the ranks, each with the first rank that has it; "" if all are equal."""
        names = {value: self.name(values.index(value)) for value in dict.fromkeys(values)}
        return (
            ", ".join(f"{value} on {name}" for value, name in names.items())
            if len(names) > 1
            else ""
        )

    def claim_first_failure(self, like: str = "") -> tuple[bool, str]:
        """Whether this rank is the first to fail, and the `like` of the rank that was (`leaving.End`).

        If the server has ended, only rank 0 counts as the first. Call it as soon as an error is caught: the
        unwinding breaks connections, and then the others fail too.
        """
        if self.connection is None:
            return True, ""
        with contextlib.suppress(ChannelLost):  # a silent launcher must not keep back the error
            self.ask("claim", key=CLAIM, like=like, within_s=_CLAIM_S)
        return self.first_failure or (self.world.rank == 0, "")

    @property
    def first_failure(self) -> tuple[bool, str] | None:
        """The answer to a claim, once it has arrived."""
        facts = self._arrived.get(CLAIM, ({}, b""))[0]
        return (facts["rank"] == self.world.rank, facts["like"]) if facts else None

    def leave(self, *, waits: bool) -> None:
        """Leave the job, so that the end of the connection is no failure. All ranks must call this.

        With `waits`, wait until all others have left.
        """
        key = self.unique_prefix("left")
        if waits and self.exchange is not None:
            self.exchange("")
        elif waits and self.world.world_size > 1:
            with contextlib.suppress(ChannelLost):
                self.ask("gather", b"null", key=key, timeout_s=LEAVE_TIMEOUT_S, or_lost=True)
        else:
            self.send("gather", b"null", key=key, timeout_s=None, or_lost=True)
        if self.group == 0:  # for a script, the end of the connection is no failure
            self.send("leave")

    def code_of_end(self) -> int:
        """The code with which another rank ends this one, or the loss of a connection, which it says."""
        lost = "the launcher" if self.has_launcher else self.name(self.lost_rank or 0)
        is_reported = self.code_of_failure and self.lost_rank is None  # by the rank that has failed
        if not is_reported and (self.has_launcher or self.world.local_rank == 0):
            name = self.name(self.world.rank)
            with contextlib.suppress(OSError):
                print_error(f"{name}: lost the connection to {lost}; exiting.")
        return self.code_of_failure or FAILED

    def ask(
        self,
        kind: str,
        value: bytes = b"",
        *,
        unless_failed: bool = False,
        within_s: float | None = None,
        **facts: object,
    ) -> tuple[dict[str, Any], bytes]:
        """Send a message, and return its answer, which has its key, or else its type.

        Raises ChannelLost if the server has ended, or has not answered within this time, and with `unless_failed`
        AnotherFailed if a rank has failed.
        """
        deadline = None if within_s is None else time.monotonic() + within_s
        key = str(facts.get("key", kind))
        ends_with = {key, CLAIM} if unless_failed else {key}
        # After a failure, the others must not go on with its value.
        if not ends_with & self._arrived.keys():
            self.send(kind, value, **facts)
        with self._changed:
            while not ends_with & self._arrived.keys():
                left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
                if self.is_lost or left_s == 0.0:
                    raise self.lost()
                if self._listens:
                    self._changed.wait(left_s)
                elif self._can_receive(left_s):
                    self.receive()
            if key not in self._arrived:
                raise AnotherFailed
            # Two threads may claim at once, and wait for one answer.
            return self._arrived[key] if kind == "claim" else self._arrived.pop(key)

    def _can_receive(self, within_s: float | None) -> bool:
        poll = select.poll()
        assert self.connection is not None
        poll.register(self.connection, select.POLLIN)
        return bool(poll.poll(None if within_s is None else 1000 * within_s))

    def lost(self) -> ChannelLost:
        return ChannelLost(f"rank {self.world.rank} has lost the connection to the other ranks.")

    def listen(
        self, on_news: Callable[[dict[str, Any]], object], look: Callable[[], object] = lambda: None
    ) -> None:
        """Receive in a thread until the connection ends. `look` is called after all news."""
        if not self._listens:
            self.on_news, self._listens = on_news, True
            for facts in self._early:
                on_news(facts)

            def receive_all() -> None:
                try:
                    look()
                    while not self.is_lost:
                        self.receive()
                        look()
                finally:  # a caller of `ask` would wait for ever
                    with self._changed:
                        self.is_lost = True
                        self._changed.notify_all()

            threading.Thread(target=receive_all, name="mpiddp", daemon=True).start()

    def receive(self) -> None:
        """Receive what arrives next: note what the ranks agree on, and pass on the other messages."""
        assert self.connection is not None
        news = []
        try:
            chunk = self.connection.recv(channel.CHUNK)
            seal = self._seals.of_server
            messages = [decode(line, seal) for line in self._lines.split(chunk)]
        except (OSError, *NO_MESSAGE):  # the server has ended, or the script has closed it
            chunk, messages = b"", []
        with self._changed:
            self.is_lost |= not chunk
            for facts, value in messages:
                match facts["type"]:
                    case kind if kind in _ANSWERS:
                        self._arrived[facts.get("key", kind)] = facts, value
                    case "failed":
                        self.lost_rank, self.code_of_failure = facts.get("lost"), facts["code"]
                    case _:
                        news.append(facts)
            self._changed.notify_all()
        with contextlib.ExitStack() as stack:  # so all are passed on, even if the first one raises
            for facts in reversed(news):
                stack.callback(self.on_news, facts)
