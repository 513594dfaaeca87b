"""A process of a rank connects to the server of its job, with proofs on both sides.

    member = connect_to_server(Server("10.0.0.1:40001", key), world, "hello")

`mpiddp.protocol.channel` has the messages.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping
from typing import NamedTuple

from mpiddp.errors import JobFailed
from mpiddp.protocol import channel
from mpiddp.protocol.channel import NO_MESSAGE, RANK, UNIX
from mpiddp.protocol.variables import LOST_AFTER_S, PATIENCE
from mpiddp.world import World

CONNECT_TIMEOUT_S = 30.0  # a rank without a connection to the server gives up after this time
_ATTEMPT_S, _RETRY_S = 10.0, 0.2


class Server(NamedTuple):
    """Where the server listens, "host:port" or "unix:path", and the key of the job.

    `is_own`: the key is that of the one member that has it. A server beside rank 0 is no launcher.
    """

    address: str
    key: str
    is_own: bool = False
    is_launcher: bool = False
    lost_s: float = 0.0  # seconds of silence, after which a launcher gives up a host

    def member_key(self, rank: int, role: str = RANK) -> str:
        return self.key if self.is_own else channel.member_key(self.key, role, rank)


class Member(NamedTuple):
    """A connection that the server has accepted, its group, and the seals of its lines.

    The group is 0 for the ranks, and n for their n-th scripts.
    """

    connection: socket.socket
    group: int
    seals: channel.Seals


class AnotherScript(Exception):
    """Another process of this rank is its script."""


def connect_to_server(
    server: Server, world: World, kind: str, *, answer_s: float | None = None, **facts: object
) -> Member:
    """Connect, and introduce this rank by a message of this kind.

    The server beside rank 0 answers in `answer_s`. For the answer of a launcher there is no limit, because it
    may be stopped (Ctrl-Z), and its kernel accepts the connection meanwhile.

    Raises AnotherScript if this rank has a script already, and JobFailed if the server cannot be reached.
    """
    deadline, is_final = time.monotonic() + (answer_s or CONNECT_TIMEOUT_S), False
    while not is_final:
        try:
            return _connect(server, world.rank, kind, facts, answer_s)
        except NO_MESSAGE:  # another program listens there, or the server of another job
            why, is_final = "it is not the server of this job", True
        except OSError as error:
            # Strangers may hold all connections. Rank 0 may not listen yet, but a launcher always does.
            is_refused = isinstance(error, ConnectionRefusedError) and answer_s is None
            why, is_final = str(error), is_refused or time.monotonic() >= deadline
            time.sleep(_RETRY_S)
    name = "the launcher" if answer_s is None else "rank 0's channel"
    sentence = (
        f"rank {world.rank} on {world.hostname} cannot reach {name} at {server.address} ({why})."
    )
    raise JobFailed(sentence, fix="check that it is running, and that no firewall blocks the port")


def _connect(
    server: Server, rank: int, kind: str, facts: Mapping[str, object], answer_s: float | None
) -> Member:
    """Prove that this process is of the job, and check that the server is."""
    with contextlib.ExitStack() as stack:
        host, _, port = server.address.rpartition(":")
        if server.address.startswith(UNIX):
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(_ATTEMPT_S)
            connection.connect(server.address.removeprefix(UNIX))
        else:
            connection = socket.create_connection((host, int(port)), _ATTEMPT_S)
        stack.enter_context(connection)
        patience_s = PATIENCE * server.lost_s or LOST_AFTER_S
        # A stopped launcher (Ctrl-Z) reads no steps. If it is lost, the rank's own connection shows it.
        is_read_slowly = kind in channel.HANDED_OVER or facts.get("role") == channel.SCRIPT
        channel.notice_silence(connection, patience_s, is_read_slowly=is_read_slowly)
        connection.settimeout(answer_s)
        key = server.member_key(rank, str(facts.get("role", RANK)))
        answer, seals = channel.introduce(connection, key, kind, rank, facts)
        if answer["type"] == "taken":
            raise AnotherScript
        connection.settimeout(None)
        stack.pop_all()
        return Member(connection, answer.get("group", 0), seals)
