"""The launcher's end of the control channel: its listening socket, the connected ranks and their messages.

It listens on one address only. It drops a connection that does not prove in time that it belongs to the
job, or that violates the protocol, without any other effect. The whole protocol is handled here.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import selectors
import signal
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpiddp.hosts.sockets import OPEN_BESIDES, allow_open
from mpiddp.launch.supervise.signals import AwakeSelector
from mpiddp.paths import cause_of
from mpiddp.protocol.messages import (
    HANDED_OVER,
    LINE_LIMIT,
    STREAMS,
    UNIX,
    UNPROVED_LINE_LIMIT,
    URGENT,
    dumps,
    is_valid,
    notice_silence,
    proof,
    script_secret,
)
from mpiddp.protocol.variables import ADDRESS, SECRET

PROOF_TIMEOUT_S = 10.0
PER_RANK = 3  # connections: its messages and its two streams
STRANGERS = 64  # connections without a proof, beyond those of the ranks

_UCRED = struct.Struct("3i")  # pid, uid, gid; linux/socket.h
_SIOCOUTQ = 0x5411  # bytes that the peer has not acknowledged yet
# What accept() reports while this machine has no file or no memory left. The connection then waits.
_NOTHING_LEFT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(frozen=True)
class Message:
    """A message from a rank, with its time by the server's clock, in seconds.

    `kind` is one of the protocol's messages, "lost", "frames", "full", or one of HANDED_OVER. "lost": the
    connection ended, and facts["silent"] is whether the host stopped answering. "frames": a line of the
    stacks that a rank writes from native code. HANDED_OVER: facts["connection"] belongs to the receiver of
    this message; that of "output" brings facts["stream"] (1 or 2) of the rank on facts["host"].
    "full", of no rank (-1): for want of facts["error"], connections wait until `accept_again`.
    `from_script`: from the script of a command, a process of its own.
    """

    rank: int
    kind: str
    facts: dict[str, Any]
    at: float
    from_script: bool = False


@dataclass(eq=False)
class Peer:
    """A process that has connected. `rank` is None until it has proved that it belongs to the job."""

    connection: socket.socket
    challenge: str
    since: float
    rank: int | None = None
    is_script: bool = False
    buffer: bytes = b""
    unsent: bytes = b""
    was_interrupted: bool = False

    def interrupt(self) -> None:
        """Make the process write its stacks: an urgent byte makes its kernel signal it."""
        self.was_interrupted = True
        with contextlib.suppress(OSError):  # the next read fails too
            if self.connection.family == socket.AF_UNIX:
                option = (socket.SOL_SOCKET, socket.SO_PEERCRED)
                pid, _, _ = _UCRED.unpack(self.connection.getsockopt(*option, _UCRED.size))
                os.kill(pid, signal.SIGURG)
            else:
                self.connection.send(URGENT, socket.MSG_OOB)

    @property
    def is_silent(self) -> bool:
        """Whether its host has not acknowledged what was sent to it over TCP."""
        return any(fcntl.ioctl(self.connection, _SIOCOUTQ, bytes(4)))


class ControlServer:
    """The server for `world_size` ranks, on a free port of `address`. It registers with `selector`.

    Args:
        address: None for ranks on this host only: a Unix socket that only this user can open.

    Raises:
        UserError: it cannot listen on `address`.
        JobFailed: a machine failed.
    """

    def __init__(
        self,
        address: str | None,
        world_size: int,
        selector: AwakeSelector,
    ) -> None:
        self.world_size = world_size
        self.selector = selector
        self._secret = os.urandom(16).hex()
        allow_open(2 * PER_RANK * world_size + OPEN_BESIDES)
        self._path: Path | None = None  # of a Unix socket
        if address is None:
            self._listener, self._path = _listen_here()
            shown = f"{UNIX}{self._path}"
        else:
            self._listener = _listen(address)
            host, port = self._listener.getsockname()[:2]
            shown = f"{host}:{port}"
        self._listener.setblocking(False)
        self._peers: set[Peer] = set()
        self._strangers: dict[Peer, None] = {}  # those without a proof, oldest first
        self._by_rank: dict[int, Peer] = {}
        # The scripts of ranks whose command is a process of its own.
        self._scripts: dict[int, Peer] = {}
        selector.register(self._listener, selectors.EVENT_READ, self)
        # The environment variables that the ranks need.
        self.settings = {ADDRESS: shown, SECRET: self._secret}

    def close(self) -> None:
        for peer in list(self._peers):
            self._drop(peer)
        self.selector.unregister(self._listener)
        self._listener.close()
        if self._path is not None:
            _remove(self._path)

    @property
    def has_ranks(self) -> bool:
        """Whether any rank is connected."""
        return bool(self._by_rank)

    @property
    def connected(self) -> set[int]:
        return set(self._by_rank)

    def receive(self, data: object) -> list[Message]:
        """The new messages of a ready socket. `data` is its data in the selector."""
        if data is self:
            return self._accept()
        assert isinstance(data, Peer)
        if data not in self._peers:  # dropped since the selector returned it
            return []
        if data.unsent:
            self._send(data)
        try:
            chunk = data.connection.recv(65536)
        except BlockingIOError:
            return []
        except OSError as error:
            return self._lose(data, silent=not isinstance(error, ConnectionError))
        if not chunk:
            return self._lose(data, silent=False)
        *lines, data.buffer = (data.buffer + chunk).split(b"\n")
        messages = []
        limit = LINE_LIMIT if data.rank is not None else UNPROVED_LINE_LIMIT
        for line in [*lines, data.buffer] if len(data.buffer) > limit else lines:
            if data not in self._peers:  # it brings a rank's output, and has been handed over
                break
            try:
                messages += self._parse(data, line)
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                return [*messages, *self._lose(data, silent=False)]
        return messages

    def end_all(self, code: int) -> None:
        """Tell every connected rank, and its script, to end."""
        for peer in [*self._scripts.values(), *self._by_rank.values()]:
            self._send_message(peer, "end", code=code)

    def request_stacks(self) -> None:
        """Request the stacks of every connected rank."""
        for rank in self._by_rank:
            self._send_message(self._script_of(rank), "stacks")

    def request_stop(self, rank: int) -> None:
        """Request a stop of the rank, if it is connected."""
        if rank in self._scripts:
            self._send_message(self._scripts[rank], "stop")
            self._send_message(self._by_rank[rank], "stopping")
        elif rank in self._by_rank:
            self._send_message(self._by_rank[rank], "stop")

    def confirm(self, message: Message) -> None:
        """Confirm to its sender that messages have been received."""
        senders = self._scripts if message.from_script else self._by_rank
        if peer := senders.get(message.rank):
            self._send_message(peer, "received")

    def _script_of(self, rank: int) -> Peer:
        """The process that runs the script of a connected rank: its own, or one within its command."""
        return self._scripts.get(rank, self._by_rank[rank])

    def _send_message(self, peer: Peer, kind: str, **facts: object) -> None:
        peer.unsent += dumps(kind, **facts)
        self._send(peer)

    def interrupt(self, rank: int) -> None:
        """Request the stacks of a rank that does not answer: its kernel interrupts it."""
        self._script_of(rank).interrupt()

    def drop_silent_hosts(self) -> list[Message]:
        """Drop the ranks whose hosts have not acknowledged what was sent to them."""
        if self._path is not None:  # this host's own kernel always answers
            return []
        messages = []
        for peer in list(self._by_rank.values()):
            if peer.is_silent:
                messages += self._lose(peer, silent=True)
        return messages

    def accept_again(self) -> None:
        """Accept the connections that wait since a message "full"."""
        self.selector.modify(self._listener, selectors.EVENT_READ, self)

    def _accept(self) -> list[Message]:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno not in _NOTHING_LEFT:  # it has already closed
                return []
            # The selector would report the socket without end. Errors are all that it may report of it now.
            self.selector.modify(self._listener, selectors.EVENT_WRITE, self)
            facts = {"error": error.strerror}
            return [Message(-1, "full", facts, self.selector.now())]
        now = self.selector.now()
        while self._strangers:
            oldest = next(iter(self._strangers))
            is_late = now - oldest.since > PROOF_TIMEOUT_S
            # A rank answers at once, so the oldest is none. A rank that is dropped all the same comes again.
            most = PER_RANK * self.world_size + STRANGERS
            if not is_late and len(self._strangers) < most:
                break
            self._drop(oldest)
        connection.setblocking(False)
        notice_silence(connection)
        peer = Peer(connection, os.urandom(16).hex(), now)
        self._peers.add(peer)
        self._strangers[peer] = None
        self.selector.register(connection, selectors.EVENT_READ, peer)
        peer.unsent = dumps("challenge", challenge=peer.challenge)
        self._send(peer)
        return []

    def _parse(self, peer: Peer, line: bytes) -> list[Message]:
        """Parse a line. Raises ValueError, or another error of a wrong value, if it violates the protocol."""
        if len(line) > (LINE_LIMIT if peer.rank is not None else UNPROVED_LINE_LIMIT):
            raise ValueError("too long")
        if peer.was_interrupted and peer.rank is not None and not _is_json(line):
            # A line of its stack, maybe in the middle of a message that it was sending.
            return [self._message(peer.rank, peer, "frames", {"text": line.decode()})]
        facts = json.loads(line)
        kind = facts.pop("type")
        is_introduction = kind == "hello" or kind in HANDED_OVER
        if not isinstance(kind, str) or is_introduction == (peer.rank is not None):
            raise ValueError(kind)
        if peer.rank is not None:
            if not is_valid(kind, facts):
                raise ValueError(kind)
            return [self._message(peer.rank, peer, kind, facts)]
        if kind in HANDED_OVER:
            return [self._hand_over(peer, kind, facts)]
        self._admit(peer, facts)
        return []

    def _hand_over(self, peer: Peer, kind: str, facts: dict[str, Any]) -> Message:
        """Give a connection to whoever receives the message."""
        rank = self._rank_of(facts)
        handed: dict[str, Any] = {}
        self._check_proof(peer, rank, facts, self._secret)
        if kind == "output":
            handed = {"stream": facts["stream"], "host": facts["host"]}
            if handed["stream"] not in STREAMS or not isinstance(handed["host"], str):
                raise ValueError(handed)
        peer.unsent += dumps("received")
        self._send(peer)  # at once: only the challenge was sent before
        self._forget(peer)
        return Message(rank, kind, {**handed, "connection": peer.connection}, self.selector.now())

    def _admit(self, peer: Peer, hello: dict[str, Any]) -> None:
        """Admit a rank, or the script of a rank. Raises ValueError if it does not belong to the job."""
        rank, is_script = self._rank_of(hello), hello.get("is_script", False) is True
        if (rank in self._by_rank) is not is_script:  # a second rank, or a script without its rank
            raise ValueError(rank)
        secret = script_secret(self._secret) if is_script else self._secret
        self._check_proof(peer, rank, hello, secret)
        if is_script and rank in self._scripts:
            self._send_message(peer, "taken")
            raise ValueError("a second script")
        peer.rank, peer.is_script = rank, is_script
        del self._strangers[peer]
        (self._scripts if is_script else self._by_rank)[rank] = peer
        self._send_message(peer, "received")

    def _rank_of(self, facts: dict[str, Any]) -> int:
        rank = facts["rank"]
        if type(rank) is not int or rank not in range(self.world_size):
            raise ValueError(rank)
        return rank

    def _check_proof(self, peer: Peer, rank: int, facts: dict[str, Any], secret: str) -> None:
        # The time of this comparison reveals nothing: every connection has another challenge.
        if facts["proof"] != proof(secret, peer.challenge, rank):
            raise ValueError("no proof")

    def _message(self, rank: int, peer: Peer, kind: str, facts: dict[str, Any]) -> Message:
        return Message(rank, kind, facts, self.selector.now(), peer.is_script)

    def _send(self, peer: Peer) -> None:
        """Send as much as the connection accepts. The rest follows when it accepts more."""
        try:
            sent = peer.connection.send(peer.unsent)
        except BlockingIOError:
            sent = 0
        except OSError:  # the next read fails too
            sent = len(peer.unsent)
        peer.unsent = peer.unsent[sent:]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        self.selector.modify(peer.connection, events, peer)

    def _lose(self, peer: Peer, *, silent: bool) -> list[Message]:
        self._drop(peer)
        if peer.rank is None:
            return []
        return [self._message(peer.rank, peer, "lost", {"silent": silent})]

    def _drop(self, peer: Peer) -> None:
        self._forget(peer)
        peer.connection.close()

    def _forget(self, peer: Peer) -> None:
        self._peers.discard(peer)
        self._strangers.pop(peer, None)
        if peer.rank is not None:
            del (self._scripts if peer.is_script else self._by_rank)[peer.rank]
        self.selector.unregister(peer.connection)


def _listen(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, 0), family=family, backlog=1024)
    except OSError as error:
        raise cause_of(error)(
            f"cannot listen on {address} of this machine ({error.strerror}). "
            "Name another interface: --interface NAME"
        ) from None


def _listen_here() -> tuple[socket.socket, Path]:
    """A Unix socket in a folder that only this user can open. Its path is short: at most 107 bytes count."""
    path = Path("/tmp", f"mpiddp-{os.urandom(8).hex()}", "control")
    try:
        path.parent.mkdir(mode=0o700)
    except OSError as error:
        raise cause_of(error)(f"cannot create a folder in /tmp ({error.strerror}).") from None
    listener = None
    try:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen(1024)
    except OSError as error:
        if listener is not None:
            listener.close()
        _remove(path)
        raise cause_of(error)(f"cannot listen at {path} ({error.strerror}).") from None
    return listener, path


def _remove(path: Path) -> None:
    """Remove the socket, if there is one, and its folder."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        path.parent.rmdir()


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
