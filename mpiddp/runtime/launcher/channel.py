"""Connect to the launcher, and prove that this rank belongs to its job: see `mpiddp.protocol.messages`."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

from mpiddp.errors import JobFailed
from mpiddp.protocol.messages import LINE_LIMIT, UNIX, dumps, notice_silence, proof
from mpiddp.runtime.launcher.native_stacks import without_urgent_bytes
from mpiddp.world import World

CONNECT_TIMEOUT_S = 30.0  # in which no connection to the launcher stands
_ATTEMPT_S, _RETRY_S = 10.0, 0.2
# The errors of a line that is not a message.
NO_MESSAGE = (ValueError, LookupError, TypeError, RecursionError)


class AnotherScript(Exception):
    """Another process of this rank's command is its script."""


def connect_to_launcher(
    address: str, secret: str, world: World, kind: str, **facts: object
) -> tuple[socket.socket, Iterator[bytes]]:
    """Connect to the launcher that listens at `address`, and introduce this rank.

    A launcher that is stopped (Ctrl-Z) answers late: its kernel accepts the connection. So there is no limit
    while a connection stands, which ends with the launcher or its host. A running launcher limits the start.

    Args:
        kind: the message that introduces the rank, with the fields `facts` besides its rank and its proof.

    Returns:
        The connection, which the launcher has accepted, and the lines that it sends from now on.

    Raises:
        AnotherScript: this rank has a script already.
        JobFailed: the launcher cannot be reached.
    """
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        connection: socket.socket | None = None
        since = time.monotonic()
        try:
            connection = _connect(address)
            since = time.monotonic()
            return connection, _introduced(connection, secret, world.rank, kind, facts)
        except ConnectionRefusedError as error:
            problem: Exception = error
            break
        except (OSError, OverflowError, *NO_MESSAGE) as error:  # OverflowError for a port
            problem = error
            if connection is not None:
                deadline += time.monotonic() - since
            if time.monotonic() > deadline:
                break
            time.sleep(_RETRY_S)  # strangers may hold all connections
    host, _, port = address.rpartition(":")
    where = f"at {host} port {port}" if not address.startswith(UNIX) else f"on {address}"
    raise JobFailed(
        f"rank {world.rank} on {world.hostname} cannot reach the launcher {where} "
        f"({problem or 'no answer'}). Check that it is running and that no firewall blocks the port."
    ) from None


def _connect(address: str) -> socket.socket:
    if address.startswith(UNIX):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(_ATTEMPT_S)
        connection.connect(address.removeprefix(UNIX))
    else:
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host, int(port)), timeout=_ATTEMPT_S)
    connection.settimeout(None)
    notice_silence(connection)
    return connection


def _introduced(
    connection: socket.socket, secret: str, rank: int, kind: str, facts: dict[str, object]
) -> Iterator[bytes]:
    """Introduce this rank, and return the lines that the launcher then sends."""
    try:
        incoming = _lines(connection)
        challenge = json.loads(next(incoming, b""))["challenge"]
        own_proof = proof(secret, challenge, rank)
        connection.sendall(dumps(kind, rank=rank, proof=own_proof, **facts))
        answer = json.loads(next(incoming, b""))["type"]
        if answer == "taken":
            raise AnotherScript
        if answer != "received":
            raise ValueError("an unexpected answer")
    except BaseException:
        connection.close()
        raise
    return incoming


def _lines(connection: socket.socket) -> Iterator[bytes]:
    """Split the stream into lines.

    `makefile` does not work here: its buffer and lock keep a forked child from closing the socket.
    """
    buffer = b""
    while chunk := connection.recv(4096):
        *lines, buffer = (buffer + without_urgent_bytes(chunk)).split(b"\n")
        yield from lines
        if len(buffer) > LINE_LIMIT:
            raise ValueError("a line that is too long")
