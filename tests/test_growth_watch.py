"""The parts of --grow that need no other host: what it refuses, the process that looks, when it stops a job.

Tests mpiddp/launch/growth.py, replan.py, restarts.py, supervise/growing.py.
python -m pytest tests/test_growth_watch.py
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest

from mpiddp.launch.options import parse_options
from mpiddp.launch.plan import make_plan
from mpiddp.launch.replan import Planner
from mpiddp.launch.supervise.agenda import Agenda
from mpiddp.launch.supervise.awake_clock import AwakeClock
from mpiddp.launch.supervise.control_server import Message
from mpiddp.launch.supervise.growing import Growing, Look
from mpiddp.launch.supervise.job_state import JobState
from tests.jobs import elastic
from tests.patience import PATIENCE_S
from tests.ranks import LAUNCH, ROOT, clean_env, launch, run_program


@pytest.mark.quick
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ("--local",),
            "--grow with --local: no host can join this machine alone. Leave out one.\n",
        ),
        (
            ("-H", "localhost:1,far.invalid:1"),
            "--grow with -H: every host of the list takes part from the start, so none can join. Write "
            "the list into a file for --hostfile, or allow missing hosts: --min-hosts H\n",
        ),
        (
            ("-H", "localhost:1", "--min-hosts", "1", "--no-check"),
            "--grow needs the preflight, which finds the hosts that can join. Leave out --no-check.\n",
        ),
        ((), "--grow: no hosts are named, so none can join. Name them: --hostfile FILE\n"),
    ],
)
def test_a_job_that_can_never_grow(options: tuple[str, ...], sentence: str) -> None:
    done = launch("--grow", "10m", *options, "-m", "platform")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", sentence)


def test_a_program_whose_file_server_is_away_is_a_problem_of_a_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, hostfile = tmp_path / "program", tmp_path / "hosts.txt"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    hostfile.write_text("localhost slots=1\n")
    options = parse_options(["--hostfile", str(hostfile), "--grow", "1h", "--", str(program)])
    planner = Planner(options, time.time(), make_plan(options, time.time(), os.environ))
    hostfile.write_text("localhost slots=2\n")
    stat = os.stat

    def away(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if str(path) == str(program):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return stat(path, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", away)
        problem = f"the job cannot grow now: {program}: Stale file handle."
        assert planner.look(None) == Look(problem=problem)
    assert planner.look(None) == Look(f"{gethostname()} has more slots", "with 2 ranks")
    hostfile.unlink()
    hostfile.symlink_to("/proc/self/mem")  # a file that cannot be read (EIO), as on a bad sector
    assert "Input/output error" in planner.look(None).problem
    assert planner.next(None).request.world_size == 1


def test_a_stop_request_after_a_growth_that_did_not_save(tmp_path: Path) -> None:
    """The ranks exceed --grace, and the next attempt has made no step: the job is interrupted."""
    folder = tmp_path / "job"
    folder.mkdir()
    hostfile = tmp_path / "hosts.txt"
    hostfile.write_text("localhost slots=1\n")
    options = ("--grow", "1", "--grace", "1s", "--hostfile", str(hostfile))
    command = [*LAUNCH, *options, str(ROOT / "tests" / "jobs" / "elastic.py"), str(folder)]
    with subprocess.Popen(
        command, env=clean_env(), cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stderr is not None
        deadline = time.monotonic() + PATIENCE_S
        while not elastic.read_steps(folder):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (folder / "slow_save").touch()
        (folder / "slow_start").touch()
        hostfile.write_text("localhost slots=2\n")
        lines = iter(launcher.stderr.readline, "")
        found = ("(--grace). From now on, hosts join only at a restart.", "restarting on")
        seen = "".join(next(line for line in lines if each in line) for each in found)
        launcher.send_signal(signal.SIGTERM)
        rest = launcher.stderr.read()
    assert launcher.returncode == 130, seen + rest
    assert "mpiddp: interrupted" in rest


PROCESS = """
import select, signal, os
from contextlib import closing
from mpiddp.launch.growth import WatchProcess
from mpiddp.launch.supervise.growing import Look
def look(most):
    if most == 0: raise OSError("no disk")
    if most is None: os.kill(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGINT)
    return Look("node1 is back", f"on {most} hosts")
def answers(watch):
    select.select([watch], [], [])
    return watch.receive()
with closing(WatchProcess(look)) as watch:
    assert watch.receive() == []
    watch.ask(3)
    assert answers(watch) == [Look("node1 is back", "on 3 hosts")]
    watch.ask(0)
    assert answers(watch) == [Look(problem="a look for hosts failed: OSError: no disk")]
    watch.ask(None)
    try: answers(watch)
    except EOFError: print("ended", flush=True)
    watch.ask(1)
with closing(WatchProcess(lambda most: signal.pause())) as watch: watch.ask(1)
try: os.waitpid(-1, 0)
except ChildProcessError: print("no child", flush=True)
"""


def test_the_process_that_looks_for_hosts() -> None:
    """It survives a Ctrl-C, reports its errors, and ends with its launcher even while it looks."""
    done = run_program(PROCESS)
    assert (done.stdout, done.stderr) == ("ended\nno child\n", "")


class Answers:
    """Answers of a process that looks for hosts."""

    def __init__(self, *looks: Look) -> None:
        self.looks = list(looks)
        self.asked: list[int | None] = []

    def fileno(self) -> int:
        raise AssertionError("nobody waits")

    def ask(self, max_ranks: int | None) -> None:
        self.asked.append(max_ranks)

    def receive(self) -> list[Look]:
        looks, self.looks = self.looks, []
        return looks


def test_a_job_says_once_why_it_does_not_grow() -> None:
    state, agenda = JobState(["node0"]), Agenda(AwakeClock())
    lines: list[str] = []
    stops: list[str] = []
    broken, back = Look(problem="broken"), Look("node1 is back", "on 2 hosts")
    answers = Answers(broken, broken, back, back, broken)
    growing = Growing(
        answers,
        1e-9,
        state,
        agenda,
        log=lines.append,
        stop=lambda: stops.append("stop"),
        may_stop=lambda: True,
    )
    growing.on_message()
    agenda.act()
    assert answers.asked == []  # not before all ranks have joined
    state.note(Message(0, "joining", {"timeout_s": 60}, 1.0))
    growing.on_message()
    agenda.act()
    assert answers.asked == [None]
    assert growing.receive()
    why = "not every rank has called mpiddp.should_stop(), so the job continues without a restart."
    assert lines == ["broken", f"node1 is back, but {why}", "broken"]
    lines.clear()
    state.note(Message(0, "supports_stop", {}, 1.0))
    facts = {"resume_args": [], "global_batch_size": 12, "max_ranks": 3}
    state.note(Message(0, "announce", facts, 1.0))
    answers.looks = [back]
    assert growing.receive()
    assert (lines, stops) == (["node1 is back: stopping to restart on 2 hosts."], ["stop"])
    agenda.act()
    assert answers.asked[-1] == 3


class Clock(AwakeClock):
    """A clock that a test sets."""

    seconds = 0.0

    def now(self) -> float:
        return self.seconds


def test_one_look_per_interval_and_none_before() -> None:
    clock, answers = Clock(), Answers()
    state, agenda = JobState(["node0"]), Agenda(clock)
    may_stop = [True]
    growing = Growing(
        answers,
        600,
        state,
        agenda,
        log=lambda line: None,
        stop=lambda: None,
        may_stop=lambda: may_stop[0],
    )

    def looks_by(seconds: float) -> int:
        """The number of looks so far, if the launcher acts now for the first time in a while."""
        clock.seconds = seconds
        growing.on_message()  # any message
        agenda.act()
        return len(answers.asked)

    def answer() -> None:
        answers.looks = [Look()]
        assert growing.receive()

    clock.seconds = 100
    state.note(Message(0, "joining", {"timeout_s": 60}, 1.0))
    assert [looks_by(each) for each in (100, 699, 700, 701)] == [0, 0, 1, 1]
    answer()  # at 701
    assert [looks_by(each) for each in (1300, 1301, 1302)] == [1, 2, 2]
    assert looks_by(9000) == 2  # one that takes long is not followed by another
    answer()
    assert [looks_by(each) for each in (9599, 9600, 9601)] == [2, 3, 3]
    answer()
    assert looks_by(20000) == 4  # the launcher was busy: intervals that were missed are not made up
    answer()
    may_stop[0] = False  # as during a stop
    assert looks_by(20600) == 4
    may_stop[0] = True
    assert [looks_by(each) for each in (21199, 21200, 21201)] == [4, 5, 5]
