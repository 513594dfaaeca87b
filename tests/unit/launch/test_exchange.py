"""A rank of `mpiddp.spawn` gets its function from the launcher, and answers, over real connections.

Tests mpiddp/launch/{control,main}.py, mpiddp/runtime/function.py.
"""

import pickle
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from mpiddp.errors import JobFailed
from mpiddp.launch.control import ControlServer, Exchange, listen
from mpiddp.protocol.channel import SCRIPT, mac, member_key
from mpiddp.protocol.group import TimedSelector
from mpiddp.protocol.variables import ADDRESS, SECRET
from mpiddp.runtime.function import received_call
from mpiddp.runtime.job.connection import Server
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.shipped import packed
from mpiddp.world import World
from tests.support.channels import connect, cut
from tests.support.errors import error

WORLD = World(rank=1, world_size=2, local_rank=1, local_world_size=2, hostname="node1")
LARGE = b"f" * 3_000_000
FACTS = {"name": "work", "source": {}, "path": [], "modules": packed({})}
FUNCTION = b64encode(pickle.dumps((FACTS, pickle.dumps(partial(len, LARGE)))))


@contextmanager
def script_of(exchange: Exchange) -> Iterator[Coordinator]:
    """The channel of a rank's script, whose launcher a thread runs."""
    pytest.importorskip("cloudpickle")
    with TimedSelector() as selector:
        server = ControlServer(listen("127.0.0.1"), 2, selector)
        is_over = threading.Event()

        def serve() -> None:
            while not is_over.is_set():
                for key, _ in selector.select(0.02):
                    for message in server.receive(key.data):
                        if message.kind in ("function", "answer"):
                            exchange.take(message, server)

        exchange.begin(server)
        thread = threading.Thread(target=serve)
        thread.start()
        where = Server(*(server.settings[name] for name in (ADDRESS, SECRET)))
        try:
            rank = connect(where, WORLD)
            own = Server(where.address, member_key(where.key, SCRIPT, WORLD.rank), is_own=True)
            yield connect(own, WORLD, SCRIPT)
            cut(rank)
        finally:
            is_over.set()
            thread.join()
            server.close()


def test_what_a_stranger_has_written_is_not_unpickled():
    """Whoever has taken over a connection does not have the secret."""
    exchange = Exchange(FUNCTION)
    with script_of(exchange) as channel:
        own, channel.server = channel.server, Server("", "another", is_own=True)
        with pytest.raises(JobFailed, match=error("connection to", "rank 1 ")):
            received_call(channel)
        body = b64encode(b"a pickle")
        channel.send("answer", body, is_result=True, mac=mac("x", "answer", body))
        channel.server = own
        assert received_call(channel)  # and so the launcher has read what was sent before
        assert exchange.results == {}
