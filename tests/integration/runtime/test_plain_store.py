"""The store of a command's ranks answers as torch's, and survives strangers.

Tests mpiddp/runtime/rendezvous/plain_store.py, torch_store.py.
python -m pytest tests/integration/runtime/test_plain_store.py
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from datetime import timedelta
from subprocess import PIPE
from typing import Any

import pytest
from torch.distributed import TCPStore

from mpiddp.runtime.job.signed_store import SignedStore
from mpiddp.runtime.rendezvous.plain_store import PlainServer, PlainStore
from tests.support.ranks import ROOT, clean_env


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        PlainServer(listener)
        yield listener.getsockname()[1]


def answers(store: Any) -> list[object]:
    """What a store answers to one sequence of requests."""
    store.set("a", "1")
    return [
        store.check(["a"]),
        store.check(["a", "b"]),
        store.multi_get(["a"]),
        store.compare_set("a", "2", "3"),
        store.compare_set("a", "1", "4"),
        store.compare_set("b", "", "5"),
        store.multi_get(["a", "b"]),
        store.delete_key("a"),
        store.delete_key("a"),
        store.check(["a"]),
    ]


def test_it_answers_as_torchs_store(port: int) -> None:
    theirs = TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=60))
    assert answers(PlainStore("127.0.0.1", port)) == answers(theirs)


def test_clients_see_each_others_values_with_their_macs(port: int) -> None:
    first = SignedStore(PlainStore("127.0.0.1", port), "secret")  # type: ignore[arg-type]
    second = first.clone()
    first.set("key", "é" * 100_000)
    assert second.get("key") == "é" * 100_000
    stranger = SignedStore(PlainStore("127.0.0.1", port), "another")  # type: ignore[arg-type]
    assert stranger.get("key") is None
    stranger.set("key", "forged")
    assert second.get("key") is None


@pytest.mark.parametrize(
    "sent",
    [
        b"\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"[]\n",
        b'["get", 1]\n',
        b'["set", "a"]\n',
        b"[" * 9999 + b"\n",
    ],
)
def test_whoever_sends_anything_else_is_dropped(port: int, sent: bytes) -> None:
    store = PlainStore("127.0.0.1", port)
    with socket.create_connection(("127.0.0.1", port), timeout=60) as stranger:
        stranger.sendall(sent)
        assert stranger.recv(100) == b""
    store.set("a", "1")
    assert store.multi_get(["a"]) == [b"1"]


def test_a_long_answer_is_refused_before_it_is_built(port: int) -> None:
    PlainStore("127.0.0.1", port).set("large", "x" * 1_000_000)
    tracemalloc.start()
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as stranger:
            stranger.sendall(json.dumps(["get", *["large"] * 500]).encode() + b"\n")
            assert stranger.recv(100) == b""
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


def test_a_client_that_never_reads_delays_nobody(port: int) -> None:
    store = PlainStore("127.0.0.1", port)
    store.set("large", "x" * 1_000_000)
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b'["get", "large"]\n' * 20)
        assert store.check(["large"])


SERVES = """
import resource, socket
from mpiddp.runtime.rendezvous.torch_store import serve_commands
from mpiddp.runtime.rendezvous.result import RendezvousResult
from mpiddp.world import World
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
listener = socket.create_server(("127.0.0.1", 0), backlog=200)
port = listener.getsockname()[1]
print(port, flush=True)
world = World(0, 100, 0, 100, master_addr="127.0.0.1", master_port=port)
serve_commands(RendezvousResult(world, (), "", "", listener, "run", "ab"), timeout_s=1e6)
"""


def test_more_ranks_than_the_limit_of_open_files() -> None:
    """`ulimit -n 64`, or the usual 1024 and 600 ranks."""
    with (
        subprocess.Popen(
            [sys.executable, "-c", SERVES], env=clean_env(), cwd=ROOT, stdout=PIPE, text=True
        ) as server,
        contextlib.ExitStack() as clients,
    ):
        clients.callback(server.kill)
        assert server.stdout is not None
        address = ("127.0.0.1", int(server.stdout.readline()))
        for _ in range(100):
            client = clients.enter_context(socket.create_connection(address, timeout=60))
            client.sendall(b'["get", "a"]\n')
            assert client.recv(100) == b"[null]\n"


def test_a_server_that_ends_is_a_runtime_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        store = threading.Thread(target=lambda: listener.accept()[0].close())
        store.start()
        with pytest.raises(RuntimeError, match="lost the connection to rank 0"):
            PlainStore("127.0.0.1", listener.getsockname()[1]).set("a", "1")
        store.join()
