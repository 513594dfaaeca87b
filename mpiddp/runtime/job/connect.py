"""Connect to the server of a job, with proofs on both sides: see `mpiddp.protocol.channel`."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

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


class Connection:
    """A connection to a server. A forked child can close it: nothing else holds its file.

    Attributes:
        group: the number of the group of the ranks, 0, or of their n-th scripts, n.
        early: the lines that have arrived with the server's answer.
    """

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.group = 0
        self.early: list[bytes] = []
        self._identity = _identity(connected.fileno())
        self._lines = Lines(_LONGEST)

    def read(self) -> list[bytes]:
        """The lines that end in what arrives next.

        Raises:
            OSError: the connection has ended.
            ValueError: what arrives is no message.
        """
        if _identity(self.socket.fileno()) != self._identity:
            raise ConnectionResetError("the script has closed the connection")
        chunk = self.socket.recv(CHUNK)
        if not chunk:
            raise ConnectionResetError("the connection has ended")
        return self._lines.split(chunk)

    def introduce(self, key: str, rank: int, kind: str, facts: Mapping[str, object]) -> None:
        """Prove that this process is of the job, and check that the server is."""
        challenge = self._next()["challenge"]
        line, expected_proof = introduction(key, challenge, kind, rank, facts)
        self.socket.sendall(line)
        answer = self._next()
        if answer["type"] == "taken":
            raise AnotherScript
        if answer["type"] != "received" or answer["proof"] != expected_proof:
            raise ValueError("no proof")
        self.group = answer.get("group", 0)

    def _next(self) -> dict[str, Any]:
        while not self.early:
            self.early += self.read()
        return decode(self.early.pop(0))[0]

    def close_in_forks(self) -> None:
        """Close it in every child that this process forks: there it would hide this one's end."""

        def close() -> None:
            if _identity(self.socket.fileno()) == self._identity:
                self.socket.close()
            else:  # the script has closed it, and its number may be another file's
                self.socket.detach()

        os.register_at_fork(after_in_child=close)


def connect_to_launcher(server: Server, member: Member, kind: str, **facts: object) -> Connection:
    """Connect to the launcher, and introduce this rank by a message of this kind.

    A launcher that is stopped (Ctrl-Z) answers late: its kernel accepts the connection. So there is no limit
    while a connection stands, which ends with the launcher or its host. A running launcher limits the start.

    Raises:
        AnotherScript: this rank has a script already.
        JobFailed: the launcher cannot be reached.
    """
    try:
        return _connect(server, member.rank, kind, facts)
    except (OSError, OverflowError, AnotherProgram) as problem:  # OverflowError for a port
        host, _, port = server.address.rpartition(":")
        is_path = server.address.startswith(UNIX)
        where = f"on {server.address}" if is_path else f"at {host} port {port}"
        raise JobFailed(
            f"rank {member.rank} on {member.hostname} cannot reach the launcher {where} ({problem}). "
            "Check that it is running and that no firewall blocks the port."
        ) from None


def connect_to_rank_0(server: Server, member: Member, role: str, timeout_s: float) -> Connection:
    """Connect to the process beside rank 0, which serves the job where no launcher does.

    Raises:
        AnotherScript: this rank has a script already.
        JobFailed: it cannot be reached.
    """
    host, _, port = server.address.rpartition(":")
    try:
        return _connect(server, member.rank, "hello", {"role": role}, timeout_s)
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


def _connect(
    server: Server,
    rank: int,
    kind: str,
    facts: Mapping[str, object],
    answer_in_s: float | None = None,
) -> Connection:
    """Connect to a server that answers in so many seconds, once it has accepted; None for no limit."""
    deadline = time.monotonic() + (answer_in_s or CONNECT_TIMEOUT_S)
    while True:
        try:
            connection = Connection(_connected(server.address))
            try:
                connection.socket.settimeout(answer_in_s)
                connection.introduce(server.key, rank, kind, facts)
                connection.socket.settimeout(None)
                return connection
            except BaseException:
                connection.socket.close()
                raise
        except ConnectionRefusedError:
            raise
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)  # strangers may hold all connections
        except NO_MESSAGE:  # another program listens there, or the server of another job
            raise AnotherProgram("it is not the server of this job") from None


def _connected(address: str) -> socket.socket:
    if address.startswith(UNIX):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(_ATTEMPT_S)
        connection.connect(address.removeprefix(UNIX))
    else:
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host, int(port)), timeout=_ATTEMPT_S)
    notice_silence(connection)
    return connection


def _identity(file: int) -> tuple[int, int] | None:
    """What distinguishes an open file from another one with its number; None once it is closed."""
    try:
        status = os.fstat(file)
    except OSError:
        return None
    return status.st_dev, status.st_ino
