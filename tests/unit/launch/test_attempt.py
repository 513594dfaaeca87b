"""What an attempt does about messages, signals and timers. Its mpirun is `sleep`, its ranks are messages.

Tests mpiddp/launch/attempt.py.
python -m pytest tests/unit/launch/test_attempt.py
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mpiddp.errors import FAILED
from mpiddp.launch import attempt
from mpiddp.launch.attempt import Attempt
from mpiddp.launch.command import Command, Starter
from mpiddp.launch.control import ControlServer, SignalQueue, listen
from mpiddp.launch.events import Record, Stop
from mpiddp.launch.mpirun import MpirunProcess, private_folder
from mpiddp.launch.options import LaunchOptions
from mpiddp.launch.output import JobOutput
from mpiddp.launch.starters import STARTERS
from mpiddp.launch.verdict import MpirunEnd, verdict
from mpiddp.protocol.channel import RANK, UNIX, encode
from mpiddp.protocol.server import Message, TimedSelector
from mpiddp.protocol.variables import ADDRESS, SECRET
from tests.support.channels import member_proof, progress

LIMIT_S = 60.0
OPEN_MPI = STARTERS[1]._replace(program=Path("/usr/bin/mpirun"))
NO_LIMITS = LaunchOptions(grace_s=1000.0)


class Job:
    """An attempt at a job of two ranks."""

    def __init__(self, options: LaunchOptions = NO_LIMITS, starter: Starter = OPEN_MPI) -> None:
        self.selector = TimedSelector()
        self.folder = Path(tempfile.mkdtemp())
        self.server = ControlServer(listen(self.folder / "control"), 2, self.selector)
        self.mpirun = MpirunProcess(starter, Command("sleep", (), ("1000",)))
        self.outputs = JobOutput(2, self.selector, *self.mpirun.streams)
        self.signals = SignalQueue()
        self.connections: list[socket.socket] = []
        self.record = Record(("a", "b"), hang_timeout_s=options.hang_timeout_s)
        self.attempt = Attempt(
            options, self.record, self.server, self.mpirun, self.outputs, self.signals
        )

    def say(self, rank: int, kind: str, **facts: Any) -> None:
        self.attempt.on_message(Message(rank, kind, facts, time.monotonic()))

    def connect(self, rank: int) -> None:
        """Connect a rank that never says anything."""
        connection = socket.socket(socket.AF_UNIX)
        self.connections.append(connection)
        connection.connect(self.server.settings[ADDRESS].removeprefix(UNIX))
        self.turn()
        challenge = json.loads(connection.recv(4096))["challenge"]
        own = member_proof(self.server.settings[SECRET], challenge, RANK, rank)
        connection.sendall(encode("hello", b"", rank=rank, challenge="", proof=own))
        self.turn()
        assert rank in self.server.connected

    def turn(self) -> None:
        for key, _ in self.selector.select(LIMIT_S):
            self.server.receive(key.data)

    def start(self, *ranks: int) -> None:
        for rank in ranks:
            self.say(rank, "started", host="ab"[rank], pid=rank + 1)

    def join(self) -> None:
        self.start(0, 1)
        for rank in (0, 1):
            self.say(rank, "joining", timeout_s=1000)

    def until(self, kind: str) -> Mapping[str, Any]:
        """Wait for the timers, until the launcher does this. Its facts."""
        deadline = time.monotonic() + LIMIT_S
        while (event := self.record.own(kind)) is None:
            assert time.monotonic() < deadline
            time.sleep(max(0.0, min(1.0, self.selector.next_at - time.monotonic())))
            for reaction in self.selector.due():
                reaction()
        return event.facts

    @property
    def end(self) -> int:
        """How mpirun ended: -N for signal N."""
        return self.mpirun._process.wait(LIMIT_S)

    def close(self) -> None:
        self.mpirun.kill_all()
        self.mpirun._process.wait(LIMIT_S)
        self.outputs.finish()
        self.outputs.settle(is_said=True)
        for connection in self.connections:
            connection.close()
        self.server.close()
        self.selector.close()
        self.signals.close()
        shutil.rmtree(self.folder)


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    made: list[Job] = []
    yield made
    for job in reversed(made):  # each restores the handlers of signals that it has found
        job.close()


def started(
    jobs: list[Job], options: LaunchOptions = NO_LIMITS, starter: Starter = OPEN_MPI
) -> Job:
    jobs.append(Job(options, starter))
    return jobs[-1]


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher looks at the job 100 times in a second."""
    monkeypatch.setattr(attempt, "CHECK_S", 0.01)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank has to start in 0.01 s."""
    monkeypatch.setattr(attempt, "START_TIMEOUT_S", 0.01)


@pytest.mark.usefixtures("soon")
def test_no_rank_starts_in_time(jobs: list[Job]) -> None:
    job = started(jobs)
    why = job.until("end")["why"]
    assert why.startswith("no rank has started in 0.01 s: mpirun or one of")
    job.attempt._end_mpirun()
    assert job.end == -signal.SIGHUP  # Open MPI's stop signal
    assert job.mpirun.was_ended


@pytest.mark.usefixtures("soon")
def test_ranks_of_which_none_joins_are_told_and_not_ended(
    jobs: list[Job], capfd: pytest.CaptureFixture[str]
) -> None:
    """They may import torch from a slow disk."""
    job = started(jobs)
    job.start(0, 1)
    job.until("asked")
    job.attempt._looks._see_stacks()
    assert job.record.own("end") is None
    assert job.mpirun.code is None
    missing = "only 0 of 2 ranks joined in 0.01 s. Missing: rank 0 on a, rank 1 on b. "
    assert missing in capfd.readouterr().err


@pytest.mark.usefixtures("soon")
def test_a_rank_that_joins_while_the_others_are_asked_for_stacks_gives_them_time(
    jobs: list[Job],
) -> None:
    job = started(jobs)
    job.start(0, 1)
    job.until("asked")
    job.say(1, "joining", timeout_s=60.0)
    job.attempt._looks._see_stacks()
    assert job.record.own("end") is None


def test_a_scheduler_may_let_a_start_wait(jobs: list[Job]) -> None:
    assert started(jobs).record.own("limit")
    job = started(jobs, starter=srun())
    assert not job.record.own("limit")
    job.start(0)
    assert job.record.own("limit")


def srun() -> Starter:
    [kind] = [each for each in STARTERS if each.has_scheduler]
    return kind._replace(program=Path("/usr/bin/srun"))


def test_a_job_without_a_step_hangs(jobs: list[Job], capfd: pytest.CaptureFixture[str]) -> None:
    job = started(jobs, replace(NO_LIMITS, hang_timeout_s=0.2))
    job.join()
    job.say(0, "progress", **progress(1))
    job.say(1, "exited")
    assert job.until("end")["why"] == "the job hung and was stopped."
    assert "no rank has made a step for 0 s: rank 0 on a does not answer" in capfd.readouterr().err


@pytest.mark.parametrize(("silent", "seconds"), [(False, 3), (True, 0)])
def test_a_failure_has_time_to_reach_the_others(
    jobs: list[Job], silent: bool, seconds: int
) -> None:
    job = started(jobs)
    job.join()
    job.say(1, "lost", silent=silent)
    now = time.monotonic()
    times = {reaction: at - now for reaction, at in job.selector.timers.items()}
    assert round(times[job.attempt._end_ranks]) == seconds
    assert round(times[job.attempt._end_mpirun]) == seconds + 1
    job.attempt._end_ranks()
    job.attempt._end_mpirun()
    assert job.end == -signal.SIGHUP
    assert job.until("end") == {"failed": True, "why": ""}
    assert job.record.stop == Stop.NONE


def test_a_request_after_a_failure_does_not_hide_it(jobs: list[Job]) -> None:
    job = started(jobs)
    job.connect(0)
    job.join()
    failure = {"code": 1, "error": "ValueError: x", "traceback": "t", "is_verdict": False}
    job.say(1, "failed", **failure)
    job.attempt.on_signal(signal.SIGINT)
    assert job.record.stop == Stop.BY_USER  # no restart
    job.record.note("mpirun", **MpirunEnd("mpirun", 1)._asdict())
    found = verdict(job.record)
    assert found.code == FAILED
    assert "rank 1 on b failed first: ValueError: x" in found.sentence


def test_an_mpirun_that_stays_when_all_ranks_have_ended_is_ended(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "EXIT_S", 0.01)
    job = started(jobs)
    job.join()
    for rank in (0, 1):
        job.say(rank, "done")
    job.until("end")
    assert job.end == -signal.SIGHUP


# --- growth ---


def resumable(
    jobs: list[Job], options: LaunchOptions = NO_LIMITS, max_ranks: int | None = None
) -> Job:
    """Ranks that can stop, save and resume."""
    job = started(jobs, options)
    job.join()
    job.say(0, "supports_stop")
    job.say(1, "supports_stop")
    announced = {"resume_args": ["--resume"], "global_batch_size": None, "max_ranks": max_ranks}
    job.say(0, "announce", **announced)
    return job


@pytest.mark.parametrize(("max_ranks", "grows"), [(None, True), (3, True), (2, False)])
def test_a_job_grows_up_to_the_ranks_that_it_can_use(
    jobs: list[Job], max_ranks: int | None, grows: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    job = resumable(jobs, max_ranks=max_ranks)
    job.attempt._grow("c can join")
    assert (job.record.stop == Stop.TO_GROW) == grows
    assert ("c can join: stopping to restart." in capfd.readouterr().err) == grows


def test_ranks_that_stop_to_grow_have_a_limit_from_the_first_save(jobs: list[Job]) -> None:
    job = resumable(jobs, replace(NO_LIMITS, grace_s=0.01))
    job.attempt._grow("c can join")
    assert job.record.own("grace") is None  # a step may take long
    job.say(0, "stopped", step=3)
    job.say(0, "exited")
    late = "rank 1 on b had not stopped 0.01 s after the request (--grace)"
    assert job.until("overdue") == {"clause": late}
    assert job.record.stop == Stop.TO_GROW
    assert job.until("end")["why"] == f"{late}."


@pytest.mark.parametrize(
    ("name", "is_used"), [("short", True), ("a b", False), ("x" * 60, False), ("gone", False)]
)
def test_an_attempt_has_a_folder_in_tmpdir_if_sockets_and_mpirun_can_use_it(
    name: str, is_used: bool
) -> None:
    """A socket's path is short, and every mpirun splits the arguments of ssh at blanks."""
    with tempfile.TemporaryDirectory(dir="/tmp") as root:
        parent = Path(root, name)
        if name != "gone":
            parent.mkdir()
        with private_folder({"TMPDIR": str(parent)}) as folder:
            assert folder.is_dir()
            assert folder.parent == (parent if is_used else Path("/tmp"))
        assert not folder.exists()


def test_an_attempt_removes_the_folders_of_killed_launchers_alone() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as root, private_folder({"TMPDIR": root}) as own:
        killed = Path(root, "mpiddp-0")
        killed.mkdir(mode=0o700)
        [lock] = own.iterdir()
        (killed / lock.name).touch()
        with private_folder({"TMPDIR": root}) as other:
            assert {*Path(root).iterdir()} == {own, other}
