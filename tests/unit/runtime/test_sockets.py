"""Ports, names, and which addresses answer, on this machine's loopback."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from mpiddp.errors import JobFailed, UserError
from mpiddp.hosts import reachability
from mpiddp.hosts.interfaces import Interface
from mpiddp.runtime.rendezvous import sockets
from tests.support.errors import error
from tests.support.patience import PATIENCE_S


def test_a_name_that_cannot_be_one(monkeypatch):
    with pytest.raises(UserError, match=error("host where", "a..b: ", "MASTER_ADDR")):
        sockets.resolve("a..b")

    def no_answer(*arguments, **options):
        raise socket.gaierror(socket.EAI_AGAIN, "an answer")

    monkeypatch.setattr(socket, "getaddrinfo", no_answer)
    with pytest.raises(JobFailed, match=error(":", "node1: ", ": an answer.")):
        sockets.resolve("node1")


def test_a_busy_program_is_no_fault_of_the_network(monkeypatch):
    """Nobody accepts the connection, and the kernel has confirmed what was sent."""
    monkeypatch.setattr(reachability, "CONNECT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        found = reachability._reach("127.0.0.1", port, time.monotonic() + PATIENCE_S)
        assert found == {"error": "", "large": ""}
    # Without a listener, the connection itself fails.
    assert reachability._reach("127.0.0.1", port, time.monotonic())["error"] == "Connection refused"


def test_strangers_do_not_keep_hosts_from_meeting(monkeypatch):
    """As of a port scanner, which connects and says nothing. A host waits for those that start later."""
    monkeypatch.setattr(
        reachability, "interfaces", lambda: [Interface("lo", "127.0.0.1", "127.0.0.0/8")]
    )
    with (
        socket.create_server(("127.0.0.2", 0)) as other,
        ThreadPoolExecutor(2) as pool,
        ExitStack() as stack,
    ):
        port = other.getsockname()[1]
        addresses = {"node0": "127.0.0.1", "node1": "127.0.0.2"}
        met = pool.submit(reachability.meet, addresses, port, PATIENCE_S, 16)
        reachability._serve(other, 1, time.monotonic() + PATIENCE_S)  # node0 listens by now
        for _ in range(40):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        reached = {"error": "", "large": ""}
        assert not met.done()
        assert reachability._reach("127.0.0.1", port, 0.0) == reached
        assert met.result(PATIENCE_S) == {"node1": reached}


def test_a_silent_address_is_waited_for_only_until_the_best_one_answers(monkeypatch):
    """connect() to an address without a route fails at once. Its socket then looks connected."""
    with (
        socket.create_server(("127.0.0.2", 0), backlog=0) as silent,
        sockets.bind("127.0.0.1", 0, "a") as listener,
    ):
        ports = [each.getsockname()[1] for each in (listener, silent)]
        clients = [socket.socket() for _ in range(4)]  # with a full backlog, the address is silent
        for each in clients:
            each.setblocking(False)
            each.connect_ex(silent.getsockname())
        monkeypatch.setattr(sockets, "PROBE_TIMEOUT_S", 0.2)
        assert sockets.reachable(["127.0.0.2"], ports[1:]) == []
        monkeypatch.setattr(sockets, "PROBE_TIMEOUT_S", PATIENCE_S)
        since = time.monotonic()
        unroutable = "255.255.255.255"
        found = sockets.reachable(["127.0.0.1", "127.0.0.2", unroutable], [*ports, 1])
        assert found == ["127.0.0.1"]
        assert time.monotonic() - since < PATIENCE_S / 2
        for each in clients:
            each.close()
