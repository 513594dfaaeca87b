"""What follows an attempt: a restart, a return to the hosts of before, or the end of the job.

Tests mpiddp/launch/job.py.
python -m pytest tests/unit/launch/test_plans_after_an_attempt.py
"""

from __future__ import annotations

import os
import re
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mpiddp.errors import BAD_INPUT, DONE, FAILED, INTERRUPTED, STOPPED
from mpiddp.hosts.ssh import Logins
from mpiddp.launch import job as jobs_of
from mpiddp.launch import policy
from mpiddp.launch.agents import Launcher
from mpiddp.launch.control import Console, SignalQueue
from mpiddp.launch.events import Announcement, Event, Record, Stop
from mpiddp.launch.options import parse_options
from mpiddp.launch.plan import Plan, make_plan
from mpiddp.launch.report import Report
from mpiddp.launch.verdict import Outcome
from tests.support.errors import error
from tests.support.machine import an_mpirun

GONE = error(":", "program: No such file or directory")
NO_GROWTH = "From now on, hosts join only at a restart.\n"
TO_GROW = Outcome(STOPPED, "stopped on request.", stop=Stop.TO_GROW)
Jobs = Callable[..., Any]


@pytest.fixture(name="jobs")
def jobs_of_one_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    """Makes jobs whose hosts are in ./hosts.txt, and whose program is ./program."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(policy, "FIRST_PAUSE_S", 0.0)
    list_hosts("localhost slots=1")
    Path("program").write_text("#!/bin/sh\n", encoding="utf-8")
    Path("program").chmod(0o755)
    where = ["--mpirun", an_mpirun(tmp_path), "--hostfile", "hosts.txt"]
    with closing(SignalQueue()) as signals:

        def make(*options: str, left_s: float = 3600.0) -> Any:
            parsed = parse_options([*where, *options, "--", "./program"])
            stop_at = time.monotonic() + left_s
            plan = make_plan(parsed, os.environ)
            of_job = (signals, Console(), stop_at, None, None, Logins())
            return jobs_of.Job(Launcher(parsed, *of_job), plan, Report("a"))

        yield make


def list_hosts(text: str) -> None:
    Path("hosts.txt").write_text(f"{text}\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("code", "stop"),
    [
        (DONE, Stop.NONE), (BAD_INPUT, Stop.NONE), (STOPPED, Stop.NONE), (INTERRUPTED, Stop.NONE),
        (FAILED, Stop.BY_USER), (FAILED, Stop.AT_ONCE), (STOPPED, Stop.BY_USER),
        (INTERRUPTED, Stop.TO_GROW),
    ],
)  # fmt: skip
def test_no_attempt_follows(jobs: Jobs, code: int, stop: Stop) -> None:
    assert jobs("--max-restarts", "3", "--grow", "1h").plan_next(Outcome(code, stop=stop)) is None


def test_the_pause_before_a_restart_grows_until_a_step_is_made(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    def no_request(signals: object, within_s: float) -> bool:
        pauses.append(within_s)
        return False

    job = jobs("--max-restarts", "20")
    monkeypatch.setattr(policy, "FIRST_PAUSE_S", 1.0)
    monkeypatch.setattr(SignalQueue, "has_stop", no_request)
    for _ in range(12):
        job.plan_next(Outcome(FAILED))
    job.plan_next(Outcome(FAILED, made_steps=True))
    job.plan_next(Outcome(FAILED))
    assert [each for each in pauses if each] == [1, 2, 4, 8, 16, 32, *[60] * 5, 1]


def test_hosts_that_cannot_be_planned_are_a_failure_of_their_own(
    jobs: Jobs, capfd: pytest.CaptureFixture[str]
) -> None:
    """The next restart may succeed, until there is none left."""
    job = jobs("--max-restarts", "2")
    Path("program").unlink()
    failure = job.plan_next(Outcome(FAILED, "rank 0 failed."))
    assert isinstance(failure, Outcome)
    assert (failure.code, failure.stop) == (FAILED, Stop.NONE)
    assert re.fullmatch(GONE, failure.sentence)
    assert "restarting" not in capfd.readouterr().err
    Path("program").symlink_to("/bin/true")
    assert isinstance(job.plan_next(failure), Plan)
    assert job.plan_next(failure) is None


# --- growth ---


def test_a_growth_that_finds_no_host_is_the_last(
    jobs: Jobs, capfd: pytest.CaptureFixture[str]
) -> None:
    job = jobs("--grow", "1h")
    assert job.plan_next(TO_GROW).request.hosts.world_size == 1
    assert f"mpiddp: the job has not grown. {NO_GROWTH}" in capfd.readouterr().err
    assert not job.may_grow


@pytest.mark.parametrize(
    ("code", "after"),
    [(STOPPED, Outcome(STOPPED, "stopped on request.")),
     (FAILED, Outcome(INTERRUPTED, "interrupted before a restart."))],
)  # fmt: skip
@pytest.mark.parametrize("by_signal", [True, False])
def test_a_request_before_a_growth_ends_the_job(
    jobs: Jobs, code: int, after: Outcome, by_signal: bool
) -> None:
    """It loses no step only if the stop for the growth has saved."""
    job = jobs("--grow", "1h", left_s=3600.0 if by_signal else 0.0)
    if by_signal:
        os.kill(os.getpid(), signal.SIGINT)
    assert job.plan_next(Outcome(code, "x.", stop=Stop.TO_GROW)) == after


# --- what one attempt tells the next ---


def test_the_first_announcement_of_each_kind_counts() -> None:
    batch = {"resume_args": ["--resume"], "global_batch_size": 12, "max_ranks": None}
    announce, folder = Event("announce", 0, batch, 1.0), Event("run_dir", 0, {"path": "/x"}, 1.0)
    for order in ((announce, folder), (folder, announce)):
        record = Record(("a", "b"))
        for event in order:
            record.add(event)
        assert record.announcement == Announcement(("--resume",), 12, None, "/x", 2)
    first = Announcement().after(Announcement(("--resume",), 12, None, "", 2))
    later = first.after(Announcement(("--other",), 24, 8, "runs/1", 3, "step_1"))
    assert later == Announcement(("--resume",), 12, 8, "runs/1", 2, "step_1")
    last = later.after(Announcement((), None, 4, "runs/2", 4, "step_2"))
    assert last == later._replace(checkpoint="step_2")


def test_an_excluded_host_may_be_gone_from_the_list(jobs: Jobs) -> None:
    """An edited list counts at a restart, whether or not it still has the host of --exclude."""
    list_hosts("localhost slots=1\nb slots=1")
    job = jobs("--max-restarts", "1", "--exclude", "b")
    list_hosts("localhost slots=2")
    planned = job.plan_next(Outcome(FAILED))
    assert planned.request.hosts.world_size == 2


def test_the_pause_ends_with_the_time_of_the_job(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "FIRST_PAUSE_S", 1000.0)
    job = jobs("--max-restarts", "2", left_s=0.2)
    job.failures.append(Outcome(FAILED))
    ended = job.plan_next(Outcome(FAILED, "rank 0 failed."))
    assert ended == Outcome(INTERRUPTED, "interrupted before a restart.")


def test_a_request_ends_the_checks_before_a_restart(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def blocks(*args: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        select.select([], [], [])  # as a login to a host that does not answer

    job = jobs("--max-restarts", "1")
    monkeypatch.setattr(jobs_of, "make_plan", blocks)
    ended = job.plan_next(Outcome(FAILED, "rank 0 failed."))
    assert ended == Outcome(INTERRUPTED, "interrupted before a restart.")
