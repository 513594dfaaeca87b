"""The launcher's end of the job channel: who is admitted, what passes, and what ends a connection.

Tests mpiddp/launch/control.py, mpiddp/protocol/server.py, from sockets of this process.
python -m pytest tests/unit/launch/test_control_server.py
"""

from __future__ import annotations

import json
import re
import selectors
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mpiddp.errors import JobFailed, UserError
from mpiddp.launch.control import ControlServer, TimedSelector
from mpiddp.protocol.channel import (
    RANK,
    SCRIPT,
    child_key,
    encode,
    member_proof,
    server_proof,
)
from mpiddp.protocol.messages import UNIX
from mpiddp.protocol.server import Message
from mpiddp.protocol.variables import ADDRESS, SECRET
from tests.support.channels import place_to_listen, progress
from tests.support.errors import error

LIMIT_S = 60.0


class Server:
    """A control server for three ranks, and the messages that it has received."""

    def __init__(self, address: str | None) -> None:
        self.selector = TimedSelector()
        self.server = ControlServer(place_to_listen(address), 3, self.selector)
        self.messages: list[Message] = []

    @property
    def secret(self) -> str:
        return self.server.settings[SECRET]

    @property
    def connections(self) -> int:
        return len(self.selector.get_map()) - 1  # without the listening socket

    def turn(self) -> None:
        for key, _ in self.selector.select(0.01):
            self.messages += self.server.receive(key.data)

    def await_messages(self, count: int) -> list[Message]:
        deadline = time.monotonic() + LIMIT_S
        while len(self.messages) < count:
            assert time.monotonic() < deadline, self.messages
            self.turn()
        found, self.messages = self.messages[:count], self.messages[count:]
        return found

    def await_connections(self, count: int) -> None:
        deadline = time.monotonic() + LIMIT_S
        while self.connections != count:
            assert time.monotonic() < deadline
            self.turn()


class Client:
    """The other end of a connection."""

    def __init__(self, server: Server, address: str = "") -> None:
        self.server = server
        address = address or server.server.settings[ADDRESS]
        if address.startswith(UNIX):
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.connect(address.removeprefix(UNIX))
        else:
            host, _, port = address.rpartition(":")
            self.socket = socket.create_connection((host, int(port)))
        self.socket.setblocking(False)
        self.buffer = b""
        self.challenge = self.receive()["challenge"]

    def receive(self) -> dict[str, Any]:
        """The next message of the server; {} at the end of the connection."""
        deadline = time.monotonic() + LIMIT_S
        while b"\n" not in self.buffer:
            assert time.monotonic() < deadline
            self.server.turn()
            try:
                chunk = self.socket.recv(4096)
            except BlockingIOError:
                continue
            except ConnectionError:
                chunk = b""
            if not chunk:
                return {}
            self.buffer += chunk
        line, _, self.buffer = self.buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def send(self, kind: str, **facts: object) -> None:
        self.socket.sendall(encode(kind, b"", **facts))

    def introduce(
        self, rank: int, /, kind: str = "hello", key: str = "", **facts: Any
    ) -> dict[str, Any]:
        """Say who this is. The answer without the server's proof, which must be right."""
        key, role = key or self.server.secret, facts.get("role", RANK)
        own = member_proof(key, self.challenge, role, facts.get("rank", rank))
        self.send(kind, **{"rank": rank, "challenge": "own", "proof": own, **facts})
        answer = self.receive()
        if answer.get("type") == "received":
            assert answer.pop("proof") == server_proof(key, "own")
            answer.pop("group", None)
        return answer


@pytest.fixture(params=["127.0.0.1", None], ids=["TCP", "Unix"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    made = Server(request.param)
    yield made
    made.server.close()
    made.selector.close()


@pytest.fixture
def rank(server: Server) -> Client:
    """Rank 1, which has been admitted."""
    client = Client(server)
    assert client.introduce(1) == {"type": "received"}
    return client


def test_a_rank_reports_and_is_lost(server: Server, rank: Client) -> None:
    assert server.server.connected == {1}
    assert server.server.has_ranks
    rank.send("started", host="a", pid=5)
    rank.socket.sendall(encode("progress", b"", **progress(3))[:5])
    (started,) = server.await_messages(1)
    assert (started.rank, started.kind, started.facts) == (1, "started", {"host": "a", "pid": 5})
    assert not started.from_script
    assert abs(started.at - time.monotonic()) < LIMIT_S
    rank.socket.sendall(encode("progress", b"", **progress(3))[5:] + encode("done"))
    assert [each.kind for each in server.await_messages(2)] == ["progress", "done"]
    rank.socket.close()
    (lost,) = server.await_messages(1)
    assert (lost.rank, lost.kind, lost.facts) == (1, "lost", {"silent": False})
    assert not server.server.has_ranks
    assert server.connections == 0


def test_what_the_launcher_asks_of_a_rank(server: Server, rank: Client) -> None:
    server.server.request_stop(1)
    server.server.request_stop(2)  # it is not connected
    server.server.request_stacks()
    server.server.send_all("end", code=3)
    assert [rank.receive() for _ in range(3)] == [
        {"type": "stop"},
        {"type": "stacks"},
        {"type": "end", "code": 3},
    ]


def test_the_script_of_a_rank_gets_what_concerns_it(server: Server, rank: Client) -> None:
    key = child_key(server.secret)
    script = Client(server)
    assert script.introduce(1, key=key, role=SCRIPT) == {"type": "received"}
    assert Client(server).introduce(1, key=key, role=SCRIPT) == {"type": "taken"}
    server.server.request_stop(1)
    server.server.request_stacks()
    server.server.send_all("end", code=1)
    assert [script.receive()["type"] for _ in range(3)] == ["stop", "stacks", "end"]
    assert [rank.receive()["type"] for _ in range(2)] == ["stopping", "end"]
    script.send("progress", **progress(1))
    (step,) = server.await_messages(1)
    assert (step.rank, step.from_script) == (1, True)
    script.socket.close()
    (lost,) = server.await_messages(1)
    assert (lost.kind, lost.from_script) == ("lost", True)
    assert server.server.connected == {1}


def test_a_script_needs_the_secret_of_scripts(server: Server, rank: Client) -> None:
    assert Client(server).introduce(1, role=SCRIPT) == {}


def test_a_stream_of_output_is_handed_over(server: Server) -> None:
    stream = Client(server)
    assert stream.introduce(2, "output", stream=2, host="b") == {"type": "received"}
    (output,) = server.await_messages(1)
    connection = output.facts.pop("connection")
    assert (output.rank, output.kind, output.facts) == (2, "output", {"stream": 2, "host": "b"})
    stream.socket.sendall(b"text")
    connection.settimeout(LIMIT_S)
    assert connection.recv(4) == b"text"
    assert server.connections == 0
    connection.close()


def test_a_viewer_asks_without_a_proof_where_viewers_connect(
    server: Server, tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "job"))
        listener.listen()
        listener.setblocking(False)
        server.selector.register(listener, selectors.EVENT_READ, listener)
        viewer = Client(server, f"{UNIX}{tmp_path}/job")
        viewer.send("view_job")
        (asked,) = server.await_messages(1)
        asked.facts["viewer"].send(encode("answer", step=3))
        assert viewer.receive() == {"type": "answer", "step": 3}
        stranger = Client(server)
        stranger.send("view_job")
        assert stranger.receive() == {}


def test_a_host_that_acknowledges_is_not_silent(server: Server, rank: Client) -> None:
    rank.send("done")  # and acknowledges what it has got
    server.await_messages(1)
    assert server.server.drop_silent_hosts() == []
    assert server.server.connected == {1}


@pytest.mark.parametrize("address", ["192.0.2.77", "2001:db8::77"])  # reserved for documentation
def test_an_address_that_this_machine_does_not_have(address: str) -> None:
    reasons = "Cannot assign requested address|Address family not supported by protocol"
    with pytest.raises((UserError, JobFailed)) as raised:
        Server(address)
    mended = error("another interface", ": --interface NAME ")
    assert re.fullmatch(rf".* {address} .*\(({reasons}).*\)\. {mended}", str(raised.value))
