"""Connect to the server of a job, with proofs on both sides: see `mpiddp.protocol.channel`."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from mpiddp.errors import JobFailed
from mpiddp.protocol.channel import CHUNK, VALUE_LIMIT, Lines, child_key, decode, introduction
from mpiddp.protocol.messages import UNIX, notice_silence
from mpiddp.world import World

CONNECT_TIMEOUT_S = 30.0  # in which no connection to the server stands
_ATTEMPT_S, _RETRY_S = 10.0, 0.2
# The errors of a line that is not a message.
NO_MESSAGE = (ValueError, LookupError, TypeError, RecursionError)
_LONGEST = 16 * VALUE_LIMIT  # bytes of an answer, which has a value of every rank


class Server(NamedTuple):
    """Where the server listens, "host:port" or "unix:path", and the key that its members share with it."""

    address: str
    key: str

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0]

    @property
    def port(self) -> str:
        return self.address.rpartition(":")[2]

    def for_children(self) -> Server:
        """As the processes that a rank starts see it."""
        return Server(self.address, child_key(self.key))


class AnotherScript(Exception):
    """Another process of this rank is its script."""


class AnotherProgram(Exception):
    """What listens at the address is not the server of this job."""


class Connection:
    """A connection to a server.

    Attributes:
        group: the number of the group of the ranks, 0, or of their n-th scripts, n.
        early: the lines that have arrived with the server's answer, which no poll reports.
    """

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.group = 0
        self.early: list[bytes] = []
        self._lines = Lines(_LONGEST)

    def read(self) -> list[bytes]:
        """The lines that have arrived early, or that end in what arrives next.

        Raises:
            OSError: the connection has ended.
            ValueError: what arrives is no message.
        """
        early, self.early = self.early, []
        if early:
            return early
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
        lines: list[bytes] = []
        while not lines:
            lines = self.read()
        line, *self.early = lines
        return decode(line)[0]


def connect_to_launcher(server: Server, world: World, kind: str, **facts: object) -> Connection:
    """Connect to the launcher, and introduce this rank by a message of this kind.

    A launcher that is stopped (Ctrl-Z) answers late: its kernel accepts the connection. So there is no limit
    while a connection stands, which ends with the launcher or its host. A running launcher limits the start.

    Raises:
        AnotherScript: this rank has a script already.
        JobFailed: the launcher cannot be reached.
    """
    try:
        return _connect(server, world.rank, kind, facts)
    except (OSError, OverflowError, AnotherProgram) as problem:  # OverflowError for a port
        is_path = server.address.startswith(UNIX)
        where = f"on {server.address}" if is_path else f"at {server.host} port {server.port}"
        raise JobFailed(
            f"rank {world.rank} on {world.hostname} cannot reach the launcher {where} ({problem}). "
            "Check that it is running and that no firewall blocks the port."
        ) from None


def connect_to_rank_0(server: Server, world: World, role: str, timeout_s: float) -> Connection:
    """Connect to the process beside rank 0, which serves the job where no launcher does.

    Raises:
        JobFailed: it cannot be reached.
    """
    rank = f"rank {world.rank} on {world.hostname}"
    try:
        return _connect(server, world.rank, "hello", {"role": role}, timeout_s)
    except AnotherProgram:
        raise JobFailed(
            f"{rank}: another program listens on {server.host} port {server.port}, not rank 0 of this job. "
            "Set MASTER_PORT to a free port."
        ) from None
    except (OSError, OverflowError) as error:
        raise JobFailed(
            f"{rank} cannot reach the other ranks at {server.host} port {server.port} ({error}). "
            "Check that rank 0 is running and that no firewall blocks the port."
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
            connection = Connection(_connected(server))
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


def _connected(server: Server) -> socket.socket:
    if server.address.startswith(UNIX):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(_ATTEMPT_S)
        connection.connect(server.address.removeprefix(UNIX))
    else:
        address = (server.host, int(server.port))
        connection = socket.create_connection(address, timeout=_ATTEMPT_S)
    notice_silence(connection)
    return connection
