"""Connect to the server of a job, with proofs on both sides: see `mpiddp.protocol.channel`."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from mpiddp.errors import JobFailed
from mpiddp.protocol.channel import (
    CHUNK,
    VALUE_LIMIT,
    Lines,
    child_key,
    decode,
    introduction,
)
from mpiddp.protocol.messages import UNIX, URGENT, notice_silence
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

    def for_children(self) -> Server:
        """As the processes that a rank starts see it."""
        return Server(self.address, child_key(self.key))


class AnotherScript(Exception):
    """Another process of this rank's command is its script."""


class AnotherProgram(Exception):
    """What listens at the address is not the server of this job."""


def connect_to_launcher(
    server: Server, world: World, kind: str, **facts: object
) -> tuple[socket.socket, Iterator[bytes]]:
    """Connect to the launcher, and introduce this rank by a message of this kind. Raises as `connect`.

    A launcher that is stopped (Ctrl-Z) answers late: its kernel accepts the connection. So there is no limit
    while a connection stands, which ends with the launcher or its host. A running launcher limits the start.

    Returns:
        The connection, which the launcher has accepted, and the lines that it sends from now on.
    """
    try:
        return introduce(server, world, kind, facts)
    except (OSError, OverflowError, AnotherProgram) as problem:  # OverflowError for a port
        address = server.address
        host, _, port = address.rpartition(":")
        where = f"at {host} port {port}" if not address.startswith(UNIX) else f"on {address}"
        raise JobFailed(
            f"rank {world.rank} on {world.hostname} cannot reach the launcher {where} ({problem}). "
            "Check that it is running and that no firewall blocks the port."
        ) from None


def introduce(
    server: Server,
    world: World,
    kind: str,
    facts: Mapping[str, object],
    *,
    answer_in_s: float | None = None,
) -> tuple[socket.socket, Iterator[bytes]]:
    """Connect to a server, and introduce this rank by a message of this kind.

    Args:
        answer_in_s: in so many seconds it answers, once it has accepted the connection. None for no limit.

    Returns:
        The connection, which the server has accepted, and the lines that it sends from now on.

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
            lines = _introduced(connection, server.key, world.rank, kind, facts)
            connection.settimeout(None)
            return connection, lines
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
) -> Iterator[bytes]:
    """Prove that this process is of the job, check that the server is, and return the lines that follow."""
    try:
        incoming = _lines(connection)
        challenge, _ = decode(_next(incoming))
        line, owed = introduction(key, challenge["challenge"], kind, rank, facts)
        connection.sendall(line)
        answer, _ = decode(_next(incoming))
        if answer["type"] == "taken":
            raise AnotherScript
        if answer["type"] != "received" or answer["proof"] != owed:
            raise ValueError("no proof")
    except BaseException:
        connection.close()
        raise
    return incoming


def _next(lines: Iterator[bytes]) -> bytes:
    for line in lines:
        return line
    raise ConnectionResetError("no answer")


def _lines(connection: socket.socket) -> Iterator[bytes]:
    """Split the stream into lines, without the urgent bytes that the kernel has left in it.

    The kernel removes an urgent byte only if it is read before the next one arrives. `makefile` does not work
    here: its buffer and lock keep a forked child from closing the socket.
    """
    lines = Lines(_LONGEST)
    while chunk := connection.recv(CHUNK):
        yield from lines.split(chunk.replace(URGENT, b""))
