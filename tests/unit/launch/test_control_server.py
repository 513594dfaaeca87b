"""The launcher's end of the job channel: what it asks of its ranks, what it gets, and who may ask it.

Tests mpiddp/launch/control.py, mpiddp/protocol/server.py. tests/integration/runtime/test_job_channel.py has
the proofs and the protocol.
python -m pytest tests/unit/launch/test_control_server.py
"""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mpiddp.errors import JobFailed, UserError
from mpiddp.launch.control import Console, ControlServer, listen
from mpiddp.protocol.channel import RANK, SCRIPT, VIEWED_AT, encode
from mpiddp.protocol.server import Message, TimedSelector
from mpiddp.protocol.variables import ADDRESS, SECRET
from mpiddp.runtime.job.coordinator import Coordinator, Server, connect_to_server
from mpiddp.world import World
from tests.support.channels import connect, cut, place_to_listen, progress
from tests.support.errors import error
from tests.support.patience import PATIENCE_S


class Job:
    """A control server for three ranks, which a thread runs, and the messages that it has received."""

    def __init__(self, address: str | None) -> None:
        self.selector = TimedSelector()
        self.server = ControlServer(listen(place_to_listen(address)), 3, self.selector)
        self.messages: list[Message] = []
        self.heard: dict[Coordinator, list[dict[str, Any]]] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.is_set():
            for key, _ in self.selector.select(0.01):
                self.messages += self.server.receive(key.data)

    @property
    def address(self) -> Server:
        return Server(*(self.server.settings[name] for name in (ADDRESS, SECRET)))

    def connect(self, rank: int, role: str = RANK) -> Coordinator:
        channel = connect(self.address, World(rank, 3, rank, 3), role)
        self.heard[channel] = []
        channel.listen(self.heard[channel].append)
        return channel

    def receives(self, *kinds: str) -> list[Message]:
        """The messages, once the latest ones are of these kinds."""
        until(lambda: tuple(each.kind for each in self.messages[-len(kinds) :]) == kinds)
        return self.messages[-len(kinds) :]

    def hears(self, channel: Coordinator, *kinds: str) -> None:
        until(lambda: tuple(each["type"] for each in self.heard[channel]) == kinds)

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        self.server.close()
        self.selector.close()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(params=["127.0.0.1", None], ids=["TCP", "Unix"])
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    with closing(Job(request.param)) as made:
        yield made


def test_a_rank_reports_and_is_lost(job: Job) -> None:
    rank = job.connect(1)
    rank.send("started", host="a", pid=5)
    (started,) = job.receives("started")
    assert (started.rank, started.facts) == (1, {"host": "a", "pid": 5})
    assert not started.from_script
    assert abs(started.at - time.monotonic()) < PATIENCE_S
    rank.send("progress", b"", **progress(3))
    rank.send("done")
    job.receives("progress", "done")
    assert job.server.drop_silent_hosts() == []  # it has acknowledged all
    assert job.server.connected == {1}
    cut(rank)
    (lost,) = job.receives("lost")
    assert (lost.rank, lost.facts) == (1, {"silent": False})
    assert not job.server.connected


def test_what_the_launcher_asks_of_a_rank(job: Job) -> None:
    rank = job.connect(1)
    job.server.request_stop(signal.SIGINT, 1)
    job.server.request_stop(signal.SIGINT, 2)  # it is not connected
    assert job.server.request_stacks() == {1}
    job.server.send_all("end", code=3)
    job.hears(rank, "stop", "stacks", "end")


def test_the_script_of_a_rank_gets_what_concerns_it(job: Job) -> None:
    rank = job.connect(1)
    script = job.connect(1, SCRIPT)
    job.server.request_stop(signal.SIGINT, 1)
    job.server.request_stacks()
    job.server.send_all("end", code=1)
    job.hears(script, "stop", "stacks", "end")
    job.hears(rank, "stopping", "end")
    script.send("progress", b"", **progress(1))
    (step,) = job.receives("progress")
    assert (step.rank, step.from_script) == (1, True)
    cut(script)
    (lost,) = job.receives("lost")
    assert (lost.rank, lost.from_script) == (1, True)
    assert job.server.connected == {1}


def test_a_stream_of_output_is_handed_over(job: Job) -> None:
    facts = {"stream": 2, "host": "b"}
    stream, _ = connect_to_server(job.address, World(2, 3, 2, 3), "output", **facts)
    (output,) = job.receives("output")
    connection = output.facts.pop("connection")
    assert (output.rank, output.facts) == (2, facts)
    stream.sendall(b"text")
    connection.settimeout(PATIENCE_S)
    assert connection.recv(4) == b"text"
    connection.close()
    stream.close()


def test_a_viewer_asks_without_a_proof_and_learns_which_job_it_is(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with closing(Console("a\x1b.py")) as console, socket.socket(socket.AF_UNIX) as viewer:
        assert console.listener is not None
        job.selector.register(console.listener, selectors.EVENT_READ, console.listener)
        (folder,) = tmp_path.glob("mpiddp/*/*")
        viewer.settimeout(PATIENCE_S)
        viewer.connect(str(folder / VIEWED_AT))
        viewer.sendall(encode("view_job"))
        (asked,) = job.receives("view_job")
        console.answer(asked.facts["viewer"], step=3)
        with viewer.makefile() as lines:
            challenge, answer = (json.loads(lines.readline()) for _ in range(2))
    assert challenge["type"] == "challenge"
    assert 0 <= answer.pop("age_s") < PATIENCE_S
    own = {"pid": os.getpid(), "name": "a\\x1b.py"}
    assert answer == {"type": "answer", **own, "step": 3}
    assert not folder.exists()


@pytest.mark.parametrize("address", ["192.0.2.77", "2001:db8::77"])  # reserved for documentation
def test_an_address_that_this_machine_does_not_have(address: str) -> None:
    reasons = "Cannot assign requested address|Address family not supported by protocol"
    with pytest.raises((UserError, JobFailed)) as raised:
        Job(address)
    fix = error("another interface", ": --interface NAME ")
    assert re.fullmatch(rf".* {address} .*\(({reasons}).*\)\. {fix}", str(raised.value))
