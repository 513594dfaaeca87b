"""One rank of each host asks the store whether anything has happened, and the others learn of it.

Tests mpiddp/runtime/job/host_news.py.
python -m pytest tests/integration/runtime/test_host_news.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
from torch.distributed import HashStore

from mpiddp.runtime.job import host_news
from mpiddp.runtime.job.host_news import HostNews
from mpiddp.runtime.job.signed_store import NEWS, SignedStore
from mpiddp.world import World

RANKS = 4


class CountingStore(SignedStore):
    """Counts the requests of one rank."""

    requests = 0

    def get(self, key: str) -> str | None:
        self.requests += 1
        return super().get(key)


class Host:
    """The ranks of one host, whose checks the test makes in turn."""

    def __init__(self, stack: ExitStack, node_rank: int = 0) -> None:
        self.store = HashStore()
        self.values = [CountingStore(self.store, "secret") for _ in range(RANKS)]
        worlds = [World(r, RANKS, r, RANKS, node_rank=node_rank) for r in range(RANKS)]
        self.news = [
            stack.enter_context(closing(HostNews(values, world)))
            for values, world in zip(self.values, worlds, strict=True)
        ]

    def check(self) -> list[bool]:
        return [each.may_be_there() for each in self.news]

    def report(self) -> None:
        self.values[0].set(NEWS, "")


@pytest.fixture
def host() -> Iterator[Host]:
    with ExitStack() as stack:
        yield Host(stack)


def test_one_rank_asks_for_all(host: Host) -> None:
    assert not any(host.check())  # here the others find the one that asks
    for values in host.values:
        values.requests = 0
    for _ in range(10):
        assert not any(host.check())
    assert [values.requests for values in host.values] == [10, 0, 0, 0]
    assert [each.asks for each in host.news] == [True, False, False, False]


def test_all_learn_of_news(host: Host) -> None:
    host.check()
    host.check()
    host.report()
    assert host.check()[0]
    host.news[0].close()  # as the watch does when the job is to stop
    assert all(host.check())


def test_they_ask_by_themselves_after_the_end_of_the_one_that_asked(host: Host) -> None:
    host.check()
    host.news[0].close()
    assert host.check() == [False] * RANKS
    assert all(each.asks for each in host.news)
    host.report()
    assert all(host.check())


def test_news_before_the_first_check(host: Host) -> None:
    host.report()
    host.check()
    host.news[0].close()
    assert all(host.check())


def test_a_rank_that_closes_does_not_disturb_the_others(host: Host) -> None:
    host.check()
    host.news[2].close()
    assert not any(host.check())
    assert [each.asks for each in host.news] == [True, False, True, False]


def test_without_the_socket_every_rank_asks(host: Host) -> None:
    host.values[0].set("asks for host/0", "a name that nobody has")
    for _ in range(host_news._ATTEMPTS + 1):
        assert not any(host.check())
    assert all(each.asks for each in host.news)
    host.report()
    assert all(host.check())


# Another user takes the name that the store gives, and keeps every connection open.
OTHER_USER = """
import os, socket, sys, time
os.setuid(65534)
server = socket.socket(socket.AF_UNIX)
server.bind("")
server.listen(10)
print(server.getsockname()[1:].decode(), flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_a_socket_of_another_user_is_not_trusted(host: Host) -> None:
    command = [sys.executable, "-c", OTHER_USER]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout is not None
        host.values[0].set("asks for host/0", other.stdout.readline().strip())
        host.check()
        assert all(each.asks for each in host.news)
        assert other.stdin is not None
        other.stdin.close()


# A process forked while the connections were open keeps copies of them, as a DataLoader's worker does.
def test_a_forked_child_does_not_hold_the_news_back(host: Host) -> None:
    host.check()
    host.check()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    try:
        host.news[0].close()
        host.report()
        assert all(host.check())
    finally:
        os.close(write)
        os.close(read)
        os.waitpid(child, 0)
