"""An mpirun that does not start, or does not end. It is `sleep`, and its ranks are messages.

Tests mpiddp/launch/run/{attempt,watchers,mpirun}.py.
"""

import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.launch.plan.command import Command, Request, Starter
from mpiddp.launch.plan.job_plan import Plan
from mpiddp.launch.plan.options import LaunchOptions
from mpiddp.launch.plan.placement import Past
from mpiddp.launch.plan.preflight import Checked
from mpiddp.launch.plan.starters import STARTERS
from mpiddp.launch.run import attempt, watchers
from mpiddp.launch.run.agents import Agents, Launcher
from mpiddp.launch.run.attempt import Attempt
from mpiddp.launch.run.control import Console, ControlServer, SignalQueue, listen
from mpiddp.launch.run.mpirun import MpirunProcess
from mpiddp.launch.run.output import JobOutput
from mpiddp.protocol.group import TimedSelector
from mpiddp.protocol.server import Event

LIMIT_S = 60.0

OPEN_MPI = STARTERS[1]._replace(program=Path("/usr/bin/mpirun"))
(SRUN,) = (kind._replace(program=Path("/usr/bin/srun")) for kind in STARTERS if kind.has_scheduler)


class Job:
    """An attempt at a job of two ranks."""

    def __init__(self, starter: Starter, stack: ExitStack) -> None:
        self.selector = stack.enter_context(TimedSelector())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = ControlServer(listen(folder / "control"), 2, self.selector)
        self.mpirun = MpirunProcess(starter, Command("sleep", (), ("1000",)))
        output = JobOutput(LaunchOptions(), 2, self.selector, self.mpirun.streams)
        stack.callback(server.close)
        stack.callback(output.settle, is_said=True)
        stack.callback(output.give_up)
        stack.callback(self.mpirun._process.wait, LIMIT_S)
        stack.callback(self.mpirun.kill_all)
        hosts = Hosts("here", (Host("localhost", ranks=2),))
        request, past = Request(hosts, ("x",), "."), Past(hosts)
        plan = Plan(LaunchOptions(), starter, past, Checked(), hosts, request)
        signals = stack.enter_context(closing(SignalQueue()))
        launcher = Launcher(signals, Console())
        agents = Agents(launcher, plan, server, self.mpirun, output, stack)
        self.attempt = Attempt(agents, watchers.WATCHERS)
        self.record = self.attempt.record

    def say(self, rank: int, kind: str, **facts: Any) -> None:
        self.attempt.on_event(Event(kind, rank, facts))

    def until_end(self) -> str:
        """Wait for the timers, until the launcher ends the job. Returns why."""
        deadline = time.monotonic() + LIMIT_S
        while (event := self.record.act("end")) is None:
            assert time.monotonic() < deadline
            time.sleep(max(0.0, min(1.0, self.selector.next_at - time.monotonic())))
            for reaction in self.selector.due():
                reaction()
        return str(event.facts["why"])


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Job]]:
    for module, limit in ((attempt, "LOOK_S"), (attempt, "EXIT_S"), (watchers, "START_TIMEOUT_S")):
        monkeypatch.setattr(module, limit, 0.01)
    with ExitStack() as stack:
        yield lambda starter: Job(starter, stack)


def test_no_rank_starts_in_time(start):
    """A scheduler may let a start wait, until the first rank has begun."""
    job = start(OPEN_MPI)
    assert job.until_end().startswith("no rank has started in 0.01 s: mpirun or one of")
    job = start(SRUN)
    assert not job.record.act("limit")
    job.say(0, "started", host="a", pid=1)
    assert job.record.act("limit")


def test_an_mpirun_that_stays_when_all_ranks_have_ended_is_ended(start):
    job = start(OPEN_MPI)
    for rank in (0, 1):
        job.say(rank, "started", host="a", pid=rank + 1)
        job.say(rank, "joining", timeout_s=1000)
        job.say(rank, "done")
    job.until_end()
    assert job.mpirun._process.wait(LIMIT_S) == -signal.SIGHUP  # Open MPI's stop signal
