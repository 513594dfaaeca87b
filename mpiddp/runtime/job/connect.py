"""Connect to the server of a job, with proofs on both sides: see `mpiddp.protocol.channel`."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from mpiddp.errors import JobFailed
from mpiddp.protocol.channel import child_key, decode, introduction
from mpiddp.protocol.messages import UNIX, UNPROVED_LINE_LIMIT, notice_silence
from mpiddp.world import World

CONNECT_TIMEOUT_S = 30.0  # in which no connection to the server stands
_ATTEMPT_S, _RETRY_S = 10.0, 0.2
# The errors of a line that is not a message.
NO_MESSAGE = (ValueError, LookupError, TypeError, RecursionError)


class Server(NamedTuple):
    """Where the server listens, "host:port" or "unix:path", and the key that its members share with it."""

    address: str
    key: str

    def for_children(self) -> Server:
        """As the processes that a rank starts see it."""
        return Server(self.address, child_key(self.key))


class AnotherScript(Exception):
    """Another process of this rank is its script."""


class Connection(NamedTuple):
    """A connection that the server has accepted, and the group: 0 of the ranks, n of their n-th scripts."""

    socket: socket.socket
    group: int


def connect_to_server(
    server: Server,
    world: World,
    kind: str,
    *,
    name: str = "the launcher",
    answer_in_s: float | None = None,
    **facts: object,
) -> Connection:
    """Connect, and introduce this rank by a message of this kind.

    A launcher that is stopped (Ctrl-Z) answers late: its kernel accepts the connection. So there is no limit
    while a connection stands, which ends with the launcher or its host. A running launcher limits the start.

    Args:
        name: of the server, for sentences.
        answer_in_s: the time in which another server answers.

    Raises:
        AnotherScript: this rank has a script already.
        JobFailed: the server cannot be reached.
    """
    deadline = time.monotonic() + (answer_in_s or CONNECT_TIMEOUT_S)
    while True:
        try:
            return _connect(server, world.rank, kind, facts, answer_in_s)
        except (ConnectionRefusedError, OverflowError) as error:  # OverflowError for a port
            why = str(error)
            break
        except OSError as error:  # strangers may hold all connections
            why = str(error)
            if time.monotonic() > deadline:
                break
            time.sleep(_RETRY_S)
        except NO_MESSAGE:  # another program listens there, or the server of another job
            why = "it is not the server of this job"
            break
    host, _, port = server.address.rpartition(":")
    is_path = server.address.startswith(UNIX)
    where = f"on {server.address}" if is_path else f"at {host} port {port}"
    raise JobFailed(
        f"rank {world.rank} on {world.hostname} cannot reach {name} {where} ({why}). "
        "Check that it is running and that no firewall blocks the port."
    )


def _connect(
    server: Server, rank: int, kind: str, facts: Mapping[str, object], answer_in_s: float | None
) -> Connection:
    """Prove that this process is of the job, and check that the server is."""
    connection = _connected(server)
    try:
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
        return Connection(connection, answer.get("group", 0))
    except BaseException:
        connection.close()
        raise


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
    line = b""
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte:
            raise ConnectionResetError("the connection has ended")
        line += byte
        if len(line) > UNPROVED_LINE_LIMIT:
            raise ValueError("too long")
    return decode(line[:-1])[0]
