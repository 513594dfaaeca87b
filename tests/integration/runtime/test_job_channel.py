"""The job channel: what ranks agree on, how long they wait, what a stranger can do to them, where it is."""

import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mpiddp.errors import JobFailed
from mpiddp.protocol.channel import (
    LINE_LIMIT,
    RANK,
    SCRIPT,
    Seal,
    decode,
    digest,
    encode,
    mac,
    member_key,
)
from mpiddp.protocol.group import TimedSelector
from mpiddp.protocol.server import ChannelServer, Event
from mpiddp.runtime.job.connection import AnotherScript, Server, connect_to_server
from mpiddp.runtime.job.coordinator import ChannelLost, Coordinator
from mpiddp.runtime.rendezvous.by_hand import connect_by_address
from mpiddp.world import World
from tests.support.channels import connect, progress
from tests.support.errors import error
from tests.support.patience import PATIENCE_S, eventually

KEY = "a key of the job"
RANKS = 3


class Job:
    """A server for RANKS ranks, which a thread runs, and the members that have connected."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port: int = self.listener.getsockname()[1]
        self.selector = TimedSelector()
        self.server = ChannelServer(self.listener, KEY, RANKS, self.selector)
        self.messages: list[Event] = []
        self.news: dict[Coordinator, list[dict[str, Any]]] = {}
        self.pool = ThreadPoolExecutor(16)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.is_set():
            for key, _ in self.selector.select(0.01):
                self.messages += self.server.receive(key.data)
            for end_a_wait in self.selector.due():
                end_a_wait()

    def join(self, rank: int, role: str = RANK) -> Coordinator:
        """A member whose messages nobody reads yet."""
        server = Server(f"127.0.0.1:{self.port}", KEY)
        return connect(server, World(rank, RANKS, rank, RANKS), role)

    def connect(self, rank: int, role: str = RANK) -> Coordinator:
        channel = self.join(rank, role)
        heard = self.news[channel] = []
        channel.listen(heard.append)
        return channel

    def receives(self, kind: str) -> Event:
        return until(lambda: [event for event in self.messages if event.kind == kind])[0]

    @contextmanager
    def stranger(self) -> Iterator[tuple[socket.socket, str]]:
        """A connection, and the challenge that it got."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S) as connection:
            facts, _ = decode(connection.recv(4096).rstrip(b"\n"))
            yield connection, facts["challenge"]

    @contextmanager
    def rank_0(self) -> Iterator[tuple[socket.socket, Seal]]:
        """A connection with the proof of rank 0, and the seal of its lines."""
        with self.stranger() as (connection, challenge):
            connection.sendall(hello(challenge))
            yield connection, Seal(member_key(KEY, RANK, 0), f"{challenge} ", "member")

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        self.server.close()
        self.selector.close()
        self.pool.shutdown()


until = partial(eventually, poll_s=0.005)


def is_dropped(connection: socket.socket) -> bool:
    with suppress(ConnectionError):
        while connection.recv(1 << 16):
            pass
    return True


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    yield job
    job.close()


# --- what ranks agree on ---


def test_a_script_reports_besides_its_rank_and_there_is_one(job):
    job.connect(1)
    script = job.connect(1, SCRIPT)
    script.send("progress", **progress(7))
    message = job.receives("progress")
    assert (message.rank, message.facts, message.from_script) == (1, progress(7), True)
    num_files = len([*Path("/proc/self/fd").iterdir()])
    with pytest.raises(AnotherScript):
        job.connect(1, SCRIPT)
    eventually(lambda: len([*Path("/proc/self/fd").iterdir()]) <= num_files)
    job.server.send(1, encode("stop"), to_script=True)
    until(lambda: [news["type"] for news in job.news[script]] == ["stop"])


def test_scripts_do_not_wait_for_a_rank_that_has_ended_before_they_connected(job):
    """A script connects with its first process group or function of mpiddp, and the rank's may have none."""
    first, *others = map(job.connect, range(RANKS))
    first.send("done")
    job.receives("done")
    scripts = [job.connect(other.world.rank, SCRIPT) for other in others]
    for script in scripts:
        script.give("stop", script.world.rank)
    assert until(lambda: scripts[0].given("stop")) == [None, 1, 2]


# --- how long they wait ---


@pytest.mark.parametrize(
    ("kind", "rank", "facts"),
    [
        ("hello", 0, {}),
        ("hello", 1, {"role": SCRIPT}),
        ("output", 0, {"stream": 1, "host": "a"}),
        ("input", 0, {}),
    ],
)
def test_the_key_of_a_script_speaks_for_nobody_else(job, kind, rank, facts):
    """It joins no rank, prints no line as a rank, takes no stdin, and is no script of another rank."""
    others = [job.connect(number) for number in range(2)]
    server = Server(f"127.0.0.1:{job.port}", member_key(KEY, SCRIPT, 0), is_own=True)
    assert connect_to_server(server, others[0].world, "hello", role=SCRIPT)  # what it is for
    world = World(rank, RANKS, 0, 1)
    with pytest.raises(JobFailed):
        connect_to_server(server, world, kind, answer_s=1.0, **facts)
    assert not [event for event in job.messages if event.kind in ("output", "input")]


# --- strangers ---


def hello(
    challenge: str,
    *,
    kind: str = "hello",
    key: str = KEY,
    proven: tuple[str, int] = (RANK, 0),
    **facts: object,
) -> bytes:
    """An introduction as rank 0, with the proof of this role and rank."""
    proof = mac(member_key(key, *proven), f"member {challenge}")
    return encode(kind, b"", rank=0, challenge="", proof=proof, **facts)


INTRODUCTIONS = {
    "no proof": lambda challenge: encode("hello", rank=0, challenge="", proof=""),
    "other rank": partial(hello, proven=(RANK, 1)),
    "another key": partial(hello, key="x"),
    "other role": partial(hello, proven=(SCRIPT, 0)),
    "the server's proof": partial(hello, proven=("server", 0), role="server"),
    "a script without its rank": partial(hello, proven=(SCRIPT, 0), role=SCRIPT),
    "garbage": lambda challenge: b"\xff\xfe\x00GET / HTTP/1.1\n\n",
    "deep": lambda challenge: b"[" * 1000 + b"\n",
    "long": lambda challenge: b"x" * (LINE_LIMIT + 70_000),
    "output": partial(hello, kind="output", stream=3, host="a"),
}


@pytest.mark.parametrize("kind", INTRODUCTIONS)
def test_a_connection_without_a_valid_hello_is_dropped(job, kind):
    with job.stranger() as (connection, challenge):
        with suppress(OSError):
            connection.sendall(INTRODUCTIONS[kind](challenge))
        assert is_dropped(connection)
    assert not job.messages
    assert not job.server.has_members


def test_a_proof_counts_on_its_own_connection_alone(job):
    with job.stranger() as (_, challenge), job.stranger() as (peer, _):
        peer.sendall(hello(challenge))
        assert is_dropped(peer)


@pytest.mark.parametrize(
    "line",
    [
        b"{]",
        b'{"type": "dance"}',
        b'{"type": "progress", "step": "x"}',
        b'{"type": "progress", "step": 1}\t1',
        b'{"type": "announce", "resume_args": "x", "global_batch_size": 1, "max_ranks": 1}',
        b'{"type": "gather"}\t1',
        b'{"type": "gather", "key": "a", "timeout_s": 1}',
        b'{"type": "gather", "key": "a", "timeout_s": "x"}\t1',
        b'{"type": "fail", "code": "1"}',
        b"[" * 100_000,
        b'{"type": "log", "path": "%s"}' % (b"x" * LINE_LIMIT),
    ],
)
def test_a_rank_that_violates_the_protocol_is_dropped(job, line):
    with job.rank_0() as (connection, seal):
        assert b"received" in connection.recv(4096)
        with suppress(OSError):
            connection.sendall(sealed(line, seal))
        assert is_dropped(connection)
    lost = job.receives("lost")
    assert (lost.rank, lost.facts["is_forged"]) == (0, False)


def sealed(line: bytes, seal: Seal) -> bytes:
    head, _, value = line.partition(b"\t")
    return seal.next(head, digest(value)) + line + b"\n"


FAILED = b'{"type": "failed", "code": 1, "error": "forged", "traceback": "", "is_verdict": true}'


@pytest.mark.parametrize("kind", ["plain", "repeated", "left out", "another connection", "changed"])
def test_a_line_that_the_member_has_not_sent_is_not_believed(job, kind):
    """Who reads the traffic can write into a connection, but has no key for the seal of a line."""
    with job.rank_0() as (connection, seal):
        first, second = (sealed(b'{"type": "leave"}', seal) for _ in range(2))
        other = Seal(member_key(KEY, RANK, 0), "x ", "member")
        lines = {
            "plain": FAILED + b"\n",
            "repeated": first + first,
            "left out": second,
            "another connection": sealed(FAILED, other),
            "changed": first.replace(b"leave", b"exited"),
        }
        connection.sendall(lines[kind])
        lost = job.receives("lost")
    assert (lost.rank, lost.facts["is_forged"]) == (0, True)
    believed = [event.kind for event in job.messages if event.kind != "lost"]
    assert believed == ["leave"] * (kind == "repeated")


def test_a_member_believes_its_server_alone(job):
    rank = job.connect(0)
    until(lambda: job.server.connected == {0})
    [peer] = job.server._ranks.values()
    peer.connection.send(
        encode("again", env={})
    )  # as a stranger would, who knows the numbers of TCP
    assert until(lambda: rank.is_lost)
    assert job.news[rank] == []


def test_a_second_connection_cannot_replace_a_connected_rank(job):
    job.connect(0)
    with job.rank_0() as (connection, _):
        assert is_dropped(connection)
    assert job.server.connected == {0}
    assert not job.messages


def test_a_server_of_another_job_is_not_believed():
    """Two steps of Slurm may compute the same port."""

    def pretend(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connection.sendall(encode("challenge", challenge="x"))
                connection.recv(4096)
                connection.sendall(encode("received", proof="") + encode("end", code=3))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=pretend, args=(listener,), daemon=True).start()
        port = listener.getsockname()[1]
        server = Server(f"127.0.0.1:{port}", KEY)
        where = ("rank 0 on ", f" at 127.0.0.1:{port} ", "(it is not the server of this job)")
        with pytest.raises(JobFailed, match=error("reach the launcher", *where)):
            connect(server, World(0, 1, 0, 1))
        listener.shutdown(socket.SHUT_RDWR)


def test_a_member_that_never_reads_delays_nobody_and_is_dropped(job, monkeypatch):
    monkeypatch.setattr(ChannelServer, "value_limit", 4 << 20)
    others = [job.connect(1), job.connect(2)]
    with job.rank_0() as (connection, seal):
        for number in range(5):
            connection.sendall(encode("gather", b"1", seal, key=str(number), timeout_s=60))
            large = "x" * 3_000_000
            calls = [
                job.pool.submit(member.all_gather_json, large, key=str(number), timeout_s=60)
                for member in others
            ]
            assert all(call.result(PATIENCE_S)[1:] == [large] * 2 for call in calls)
            if job.messages:
                break
        assert job.receives("lost").rank == 0


def test_a_rank_that_cannot_reach_rank_0_names_the_address(monkeypatch):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port = str(silent.getsockname()[1])
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", port)
        with pytest.raises(JobFailed) as refused:
            connect_by_address(Coordinator(World(1, 2, 1, 2)), 0.3)
    values = (f"rank 1 on {socket.gethostname()} ", f" at 127.0.0.1:{port} ", "refused")
    assert re.fullmatch(error("reach rank 0's channel", *values), str(refused.value))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_in_the_thread_that_receives_ends_every_wait(job):
    """Nobody else would receive the answer."""
    other = job.connect(1)
    first = job.join(0)
    first.listen(lambda news: 1 / 0)
    wait = job.pool.submit(first.leave, waits=True)
    gather = job.pool.submit(first.all_gather_json, 0, key="key", timeout_s=600)
    until(lambda: job.selector.next_at < float("inf"))
    other.give("called", 1)
    assert wait.exception(PATIENCE_S) is None
    assert isinstance(gather.exception(PATIENCE_S), ChannelLost)


def test_news_that_ends_a_program_loses_no_later_news(job):
    """The agent of a rank raises at the first, and has to hear the second."""
    channel = job.join(1)
    heard = []

    def end(facts: dict[str, Any]) -> None:
        heard.append(facts["type"])
        if facts["type"] == "hold":
            raise InterruptedError

    channel.on_news = end
    job.server.send(1, encode("hold"))
    job.server.send(1, encode("end"))
    with pytest.raises(InterruptedError):
        eventually(channel.receive)
    eventually(lambda: heard == ["hold", "end"] or channel.receive())
