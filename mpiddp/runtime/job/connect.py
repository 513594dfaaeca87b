"""Connect to the server of a job, with proofs on both sides: see `mpiddp.protocol.channel`."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from mpiddp.errors import JobFailed
from mpiddp.protocol.channel import CHUNK, VALUE_LIMIT, Lines, child_key, decode, introduction
from mpiddp.protocol.messages import UNIX, notice_silence

CONNECT_TIMEOUT_S = 30.0  # in which no connection to the server stands
_ATTEMPT_S, _RETRY_S = 10.0, 0.2
# The errors of a line that is not a message.
NO_MESSAGE = (ValueError, LookupError, TypeError, RecursionError)
_LONGEST = 16 * VALUE_LIMIT  # bytes of an answer, which has a value of every rank


class Member(Protocol):
    """Who connects: a `mpiddp.world.World`, or what a script has of it before its first line."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def hostname(self) -> str: ...


class Server(NamedTuple):
    """Where the server listens, "host:port" or "unix:path", and the key that its members share with it."""

    address: str
    key: str

    def for_children(self) -> Server:
        """As the processes that a rank starts see it."""
        return Server(self.address, child_key(self.key))


class AnotherScript(Exception):
    """Another process of this rank is its script."""


class AnotherProgram(Exception):
    """What listens at the address is not the server of this job."""


class Incoming:
    """The lines that arrive over a connection. A forked child can close it: nothing else holds its file."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._identity = _identity(connection.fileno())
        self._lines = Lines(_LONGEST)

    def read(self) -> list[bytes]:
        """The lines that end in what arrives next.

        Raises:
            OSError: the connection has ended.
            ValueError: what arrives is no message.
        """
        if _identity(self._connection.fileno()) != self._identity:
            raise ConnectionResetError("the script has closed the connection")
        chunk = self._connection.recv(CHUNK)
        if not chunk:
            raise ConnectionResetError("the connection has ended")
        return self._lines.split(chunk)


class Accepted(NamedTuple):
    """A connection that the server has accepted, and what it has sent since. `early` arrived with that."""

    connection: socket.socket
    incoming: Incoming
    early: list[bytes]


def connect_to_launcher(server: Server, member: Member, kind: str, **facts: object) -> Accepted:
    """Connect to the launcher, and introduce this rank by a message of this kind.

    A launcher that is stopped (Ctrl-Z) answers late: its kernel accepts the connection. So there is no limit
    while a connection stands, which ends with the launcher or its host. A running launcher limits the start.

    Raises:
        AnotherScript: this rank has a script already.
        JobFailed: the launcher cannot be reached.
    """
    try:
        return introduce(server, member, kind, facts)
    except (OSError, OverflowError, AnotherProgram) as problem:  # OverflowError for a port
        address = server.address
        host, _, port = address.rpartition(":")
        where = f"at {host} port {port}" if not address.startswith(UNIX) else f"on {address}"
        raise JobFailed(
            f"rank {member.rank} on {member.hostname} cannot reach the launcher {where} ({problem}). "
            "Check that it is running and that no firewall blocks the port."
        ) from None


def connect_to_rank_0(server: Server, member: Member, role: str, timeout_s: float) -> Accepted:
    """Connect to the process beside rank 0, which serves the job where no launcher does.

    Raises:
        AnotherScript: this rank has a script already.
        JobFailed: it cannot be reached.
    """
    host, _, port = server.address.rpartition(":")
    try:
        return introduce(server, member, "hello", {"role": role}, answer_in_s=timeout_s)
    except AnotherProgram:
        raise JobFailed(
            f"rank {member.rank} on {member.hostname}: another program listens on {host} port {port}, not "
            "rank 0 of this job. Set MASTER_PORT to a free port."
        ) from None
    except (OSError, OverflowError) as error:
        raise JobFailed(
            f"rank {member.rank} on {member.hostname} cannot reach the other ranks at {host} port {port} "
            f"({error}). Check that rank 0 is running and that no firewall blocks the port."
        ) from None


def introduce(
    server: Server,
    member: Member,
    kind: str,
    facts: Mapping[str, object],
    *,
    answer_in_s: float | None = None,
) -> Accepted:
    """Connect to a server, and introduce this rank by a message of this kind.

    Args:
        answer_in_s: in so many seconds it answers, once it has accepted the connection. None for no limit.

    Raises:
        AnotherScript: this rank has a script already.
        AnotherProgram: what listens there is not the server of this job.
        OSError, OverflowError: the server cannot be reached.
    """
    deadline = time.monotonic() + (answer_in_s or CONNECT_TIMEOUT_S)
    while True:
        connection: socket.socket | None = None
        since = time.monotonic()
        try:
            connection = _connect(server.address)
            since = time.monotonic()
            connection.settimeout(answer_in_s)
            accepted = _introduced(connection, server.key, member.rank, kind, facts)
            connection.settimeout(None)
            return accepted
        except ConnectionRefusedError:
            raise
        except OSError:
            if connection is not None and answer_in_s is None:
                deadline += time.monotonic() - since
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)  # strangers may hold all connections
        except NO_MESSAGE:  # another program listens there, or the server of another job
            raise AnotherProgram("it is not the server of this job") from None


def _connect(address: str) -> socket.socket:
    if address.startswith(UNIX):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(_ATTEMPT_S)
        connection.connect(address.removeprefix(UNIX))
    else:
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host, int(port)), timeout=_ATTEMPT_S)
    notice_silence(connection)
    return connection


def _introduced(
    connection: socket.socket, key: str, rank: int, kind: str, facts: Mapping[str, object]
) -> Accepted:
    """Prove that this process is of the job, and check that the server is."""
    try:
        incoming = Incoming(connection)
        lines: list[bytes] = []
        challenge, _ = decode(_next(incoming, lines))
        line, expected_proof = introduction(key, challenge["challenge"], kind, rank, facts)
        connection.sendall(line)
        answer, _ = decode(_next(incoming, lines))
        if answer["type"] == "taken":
            raise AnotherScript
        if answer["type"] != "received" or answer["proof"] != expected_proof:
            raise ValueError("no proof")
    except BaseException:
        connection.close()
        raise
    return Accepted(connection, incoming, lines)


def _next(incoming: Incoming, lines: list[bytes]) -> bytes:
    while not lines:
        lines += incoming.read()
    return lines.pop(0)


def close_in_forks(connection: socket.socket) -> None:
    """Close the connection in every child that this process forks: there it would hide this one's end."""
    file = connection.fileno()
    found = _identity(file)

    def close() -> None:
        if _identity(file) == found:
            connection.close()
        else:  # the script has closed it, and its number may be another file's
            connection.detach()

    os.register_at_fork(after_in_child=close)


def _identity(file: int) -> tuple[int, int] | None:
    """What distinguishes an open file from another one with its number; None once it is closed."""
    try:
        status = os.fstat(file)
    except OSError:
        return None
    return status.st_dev, status.st_ino
