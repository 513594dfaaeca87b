"""A connection to the server of the job, with proofs on both sides: see `mpiddp.protocol.channel`."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from mpiddp.errors import JobFailed
from mpiddp.protocol.channel import UNIX, UNPROVED_LINE_LIMIT, decode, introduction, notice_silence
from mpiddp.world import World

CONNECT_TIMEOUT_S = 30.0  # in which no connection to the server stands
_ATTEMPT_S, _RETRY_S = 10.0, 0.2
# The errors of a line that is not a message, and of an address that is none.
NO_MESSAGE = (ValueError, LookupError, TypeError, RecursionError, OverflowError)


class Server(NamedTuple):
    """Where the server listens, "host:port" or "unix:path", and the key that its members share with it."""

    address: str
    key: str


class AnotherScript(Exception):
    """Another process of this rank is its script."""


def connect_to_server(
    server: Server, world: World, kind: str, *, answer_s: float | None = None, **facts: object
) -> tuple[socket.socket, int]:
    """Connect, and introduce this rank by a message of this kind.

    A launcher that is stopped (Ctrl-Z) answers late: its kernel accepts the connection. So there is no limit
    while a connection stands, which ends with the launcher or its host. A running launcher limits the start.
    The server beside rank 0 answers in `answer_s`.

    Returns the connection, and the group of the member: 0 of the ranks, n of their n-th scripts. Raises
    AnotherScript if this rank has a script already, and JobFailed if the server cannot be reached.
    """
    deadline = time.monotonic() + (answer_s or CONNECT_TIMEOUT_S)
    while True:
        try:
            return _connect(server, world.rank, kind, facts, answer_s)
        except NO_MESSAGE:  # another program listens there, or the server of another job
            why = "it is not the server of this job"
            break
        except OSError as error:
            why = str(error)
            # Strangers may hold all connections. Rank 0 may not listen yet, but a launcher always does.
            has_ended = isinstance(error, ConnectionRefusedError) and answer_s is None
            if has_ended or time.monotonic() >= deadline:
                break
            time.sleep(_RETRY_S)
    name = "the launcher" if answer_s is None else "rank 0's channel"
    host, _, port = server.address.rpartition(":")
    is_path = server.address.startswith(UNIX)
    where = f"on {server.address}" if is_path else f"at {host} port {port}"
    raise JobFailed(
        f"rank {world.rank} on {world.hostname} cannot reach {name} {where} ({why}). "
        "Check that it is running and that no firewall blocks the port."
    )


def _connect(
    server: Server, rank: int, kind: str, facts: Mapping[str, object], answer_s: float | None
) -> tuple[socket.socket, int]:
    """Prove that this process is of the job, and check that the server is."""
    with contextlib.ExitStack() as stack:
        if server.address.startswith(UNIX):
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            connection.settimeout(_ATTEMPT_S)
            connection.connect(server.address.removeprefix(UNIX))
        else:
            host, _, port = server.address.rpartition(":")
            connection = socket.create_connection((host, int(port)), timeout=_ATTEMPT_S)
            stack.enter_context(connection)
        notice_silence(connection)
        connection.settimeout(answer_s)
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


def _next(connection: socket.socket) -> dict[str, Any]:
    """The next message. What follows it is left to the connection's owner."""
    with connection.makefile("rb", buffering=0) as bytes_of_it:
        line = bytes_of_it.readline(UNPROVED_LINE_LIMIT)
    if not line.endswith(b"\n"):
        raise ConnectionResetError("the connection has ended")
    return decode(line[:-1])[0]
