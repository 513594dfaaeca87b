"""A rank of `mpiddp.spawn` gets its function from the launcher, and answers, over real connections.

Tests mpiddp/launch/exchange.py, mpiddp/runtime/function.py.
python -m pytest tests/unit/launch/test_exchange.py
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from mpiddp.errors import JobFailed, UserError
from mpiddp.launch.control import ControlServer
from mpiddp.launch.events import TimedSelector
from mpiddp.launch.exchange import Exchange
from mpiddp.protocol.channel import decode, encode, server_proof
from mpiddp.protocol.messages import ANSWER, GO
from mpiddp.protocol.payload import Payload, send_payload
from mpiddp.protocol.variables import ADDRESS, SECRET
from mpiddp.runtime.function import Caller
from mpiddp.runtime.job.connect import Server, connect_to_launcher
from mpiddp.runtime.job.ending import Refused
from mpiddp.world import World
from tests.support.channels import place_to_listen
from tests.support.errors import error

WORLD = World(rank=1, world_size=2, local_rank=1, local_world_size=2, hostname="node1")
LIMIT = 1000
FUNCTION = Payload({"name": "work", "max_result_bytes": LIMIT}, b"f" * 3_000_000)


class Launcher:
    """A control server, served in a thread, which gives an exchange its connections."""

    def __init__(self, exchange: Exchange, address: str | None) -> None:
        self.selector = TimedSelector()
        self.server = ControlServer(place_to_listen(address), 2, self.selector)
        self.exchange = exchange
        self.channel = Server(*(self.server.settings[name] for name in (ADDRESS, SECRET)))
        exchange.begin(self.channel.key, 2)
        self.is_over = False

    def serve(self) -> None:
        while not self.is_over:
            for key, _ in self.selector.select(0.02):
                for message in self.server.receive(key.data):
                    self.exchange.add(message.rank, message.kind, **message.facts)


@contextmanager
def launched(exchange: Exchange, address: str | None = "127.0.0.1") -> Iterator[Launcher]:
    launcher = Launcher(exchange, address)
    thread = threading.Thread(target=launcher.serve)
    thread.start()
    try:
        yield launcher
    finally:
        launcher.is_over = True
        thread.join()
        launcher.server.close()
        launcher.selector.close()


@pytest.mark.parametrize("address", ["127.0.0.1", None])
def test_the_function_arrives_and_the_answer_is_there_before_the_rank_continues(
    address: str | None,
) -> None:
    exchange = Exchange(FUNCTION, LIMIT)
    with launched(exchange, address) as launcher:
        caller = Caller(launcher.channel, WORLD)
        assert caller.function() == FUNCTION
        caller.answer({"kind": "result"}, b"r" * LIMIT)
        assert exchange.answers == {1: Payload({"kind": "result"}, b"r" * LIMIT)}
        exchange.begin(launcher.channel.key, 2)  # a restart
        assert exchange.answers == {}


def test_an_answer_that_breaks_the_rules_does_not_count() -> None:
    exchange = Exchange(FUNCTION, LIMIT)
    with launched(exchange) as launcher:
        caller = Caller(launcher.channel, WORLD)
        lost = error("launcher during", "rank 1 on node1 ", " answer")
        with pytest.raises(JobFailed, match=lost):
            caller.answer({"kind": "result"}, b"r" * (LIMIT + 1))
        # Whoever has taken over a rank's connection does not have the secret.
        stranger = connect_to_launcher(launcher.channel, WORLD, ANSWER).connection
        with stranger:
            send_payload(stranger, Payload({"kind": "result"}), "another", f"{ANSWER} 1")
            assert stranger.recv(len(GO)) == b""
        assert exchange.answers == {}


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("1" * 32, error("reach the launcher", "rank 1 on node1 ", "not the server of this job")),
        # It passes the launcher's proof on.
        ("0" * 32, error("launcher during", "rank 1 on node1 ", " function", "a wrong MAC")),
    ],
)
def test_a_function_from_a_stranger_is_refused(key: str, sentence: str) -> None:
    """A rank that is led to another address than its launcher's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        thread = threading.Thread(target=pretend, args=(server, key))
        thread.start()
        caller = Caller(Server(f"{host}:{port}", "0" * 32), WORLD)
        with pytest.raises(JobFailed, match=sentence):
            caller.function()
        thread.join()


def pretend(server: socket.socket, key: str) -> None:
    connection, _ = server.accept()
    with connection, suppress(ConnectionError):
        connection.sendall(encode("challenge", challenge="x"))
        facts, _ = decode(connection.recv(4096).rstrip())
        connection.sendall(encode("received", proof=server_proof(key, facts["challenge"])))
        connection.recv(len(GO))
        send_payload(connection, Payload({}, b"a pickle"), "1" * 32, "function")


def test_a_job_of_a_script_has_no_function() -> None:
    with launched(Exchange()) as launcher:
        caller = Caller(launcher.channel, WORLD)
        reason = "(the other end has closed the connection|Connection reset by peer)"
        lost = error("launcher during", "rank 1 on node1 ", " function")
        with pytest.raises(JobFailed, match=f"(?=.*{reason}){lost}"):
            caller.function()


@pytest.mark.parametrize(
    ("raised", "kind", "reason"),
    [
        (ValueError("a bug"), "exception", "ValueError: a bug\n"),
        (asyncio.CancelledError("late"), "exception", "CancelledError: late\n"),
        (UserError("bad input."), "refusal", "bad input."),
        (Refused(2, "all refuse."), "refusal", "all refuse."),
        (JobFailed("a host is lost."), "", ""),
        (SystemExit(3), "", ""),
    ],
)
def test_the_caller_receives_errors(raised: BaseException, kind: str, reason: str) -> None:
    exchange = Exchange(FUNCTION, LIMIT)
    with launched(exchange) as launcher:
        caller = Caller(launcher.channel, WORLD)
        caller.function()
        with pytest.raises(type(raised)), caller.reporting_errors():
            raise raised
    if not kind:
        assert exchange.answers == {}
        return
    facts = exchange.answers[1].facts
    assert facts["kind"] == kind
    assert (facts.get("sentence") or facts["traceback"]).endswith(reason)
