"""The parts of --grow that need no other host: what it refuses, a look, the thread that looks.

Tests mpiddp/launch/grow.py, restarts.py, supervise/mpirun.py.
python -m pytest tests/unit/launch/test_growth_watch.py
"""

from __future__ import annotations

import errno
import os
import re
import select
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mpiddp.launch import restarts
from mpiddp.launch.grow import Found, HostSearch, look
from mpiddp.launch.options import LaunchOptions, parse_options
from mpiddp.launch.plan import Plan, make_plan
from mpiddp.launch.supervise.signals import queued_signals
from tests.support.an_mpirun import an_mpirun
from tests.support.errors import error
from tests.support.patience import PATIENCE_S
from tests.support.ranks import run_program


def test_a_program_whose_file_server_is_away_is_a_problem_of_a_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, hostfile = tmp_path / "program", tmp_path / "hosts.txt"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    hostfile.write_text("localhost slots=1\n")
    where = ["--mpirun", an_mpirun(tmp_path), "--hostfile", str(hostfile)]
    options = parse_options([*where, "--grow", "1h", "--", str(program)])
    plan = make_plan(options, os.environ)
    hostfile.write_text("localhost slots=2\n")
    stat = os.stat

    def away(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if str(path) == str(program):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return stat(path, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", away)
        found = look(options, plan)
    assert found.host == ""
    stale = error(":", f"{program}: Stale file handle")
    assert re.fullmatch(f"the job cannot grow now: {stale}", found.problem)
    assert look(options, plan) == Found("localhost has more slots")
    hostfile.unlink()
    hostfile.symlink_to("/proc/self/mem")  # a file that cannot be read (EIO), as on a bad sector
    unreadable = error("cannot be read", f"{hostfile} ", "Input/output error")
    assert re.search(unreadable, look(options, plan).problem)
    with queued_signals() as signals:
        job = restarts._Job(options, plan, time.time(), signals, None)
        assert job._next_plan().request.world_size == 1


def test_a_working_folder_that_was_removed_is_a_problem_of_a_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "removed"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "hosts.txt").write_text("localhost slots=1\n")
    where = ["--mpirun", an_mpirun(tmp_path), "--hostfile", "hosts.txt"]
    options = parse_options([*where, "--grow", "1h", "--", "true"])
    plan = make_plan(options, os.environ)
    (folder / "hosts.txt").unlink()
    folder.rmdir()
    removed = error("Not falling", "hosts.txt ", "a folder that was removed")
    assert re.search(removed, look(options, plan).problem)


# --- one look ---


def planned(tmp_path: Path, listed: str, *options: str) -> tuple[LaunchOptions, Plan]:
    """The options and the plan of a job on the hosts of `hosts.txt`."""
    hostfile = tmp_path / "hosts.txt"
    hostfile.write_text(listed)
    where = ["--mpirun", an_mpirun(tmp_path), "--hostfile", str(hostfile)]
    found = parse_options([*where, "--grow", "1h", *options, "--", "true"])
    return found, make_plan(found, os.environ)


@pytest.mark.parametrize(
    ("options", "later", "found"),
    [
        ((), "localhost slots=2\n", ""),
        ((), "localhost slots=3\n", "localhost has more slots"),
        ((), "localhost slots=1\n", ""),
        ((), "localhost\n", ""),
        (("-n", "2"), "localhost slots=3\n", ""),
        # A host without a rank is not asked, nor is one that is only a spare.
        ((), "localhost slots=2\nnowhere.invalid slots=0\n", ""),
        (("--spares", "0"), "localhost slots=2\n", ""),
    ],
)
def test_a_look_at_this_machine(
    tmp_path: Path, options: tuple[str, ...], later: str, found: str
) -> None:
    with_options, plan = planned(tmp_path, "localhost slots=2\n", *options)
    (tmp_path / "hosts.txt").write_text(later)
    assert look(with_options, plan) == Found(found)


@pytest.mark.parametrize(
    ("options", "later", "found"),
    [
        ((), "localhost slots=1\na.invalid slots=1\nb.invalid slots=1\n",
         "a.invalid and b.invalid can join"),
        (("--spares", "0"), "localhost slots=2\na.invalid slots=1\n", "a.invalid can join"),
        ((), "localhost slots=2\n", "localhost has more slots"),
        (("-n", "1"), "localhost slots=1\na.invalid slots=1\n", ""),
    ],
)  # fmt: skip
def test_hosts_that_nobody_checks_can_join(
    tmp_path: Path, options: tuple[str, ...], later: str, found: str
) -> None:
    with_options, plan = planned(tmp_path, "localhost slots=1\n", *options)
    (tmp_path / "hosts.txt").write_text(later)
    assert look(unchecked(with_options), plan) == Found(found)


def unchecked(options: LaunchOptions) -> LaunchOptions:
    return replace(options, check=False)


def test_a_spare_does_not_join(tmp_path: Path) -> None:
    options, plan = planned(tmp_path, "localhost slots=1\n")
    with_spare = unchecked(replace(options, spares=1))
    for later, found in (
        ("a.invalid slots=1\n", ""),
        ("a.invalid slots=1\nb.invalid slots=1\n", "a.invalid and b.invalid can join"),
    ):
        (tmp_path / "hosts.txt").write_text(f"localhost slots=1\n{later}")
        assert look(with_spare, plan) == Found(found)


def test_a_host_that_does_not_answer_is_not_found(tmp_path: Path) -> None:
    options, plan = planned(tmp_path, "localhost slots=1\n")
    (tmp_path / "hosts.txt").write_text("localhost slots=1\nnowhere.invalid slots=1\n")
    assert look(options, plan) == Found()


# --- the thread that looks ---


def test_looks_repeat_until_the_search_is_closed(tmp_path: Path) -> None:
    options, plan = planned(tmp_path, "localhost slots=1\n")
    every = replace(options, grow_s=0.05)
    search = HostSearch(every, plan)
    (tmp_path / "hosts.txt").write_text("localhost slots=2\n")
    before = threading.active_count()
    assert not select.select([search], [], [], 0.2)[0]  # it has not begun
    search.begin()
    for _ in range(2):
        assert select.select([search], [], [], PATIENCE_S)[0]
        assert search.found() == Found("localhost has more slots")
    search.close()
    deadline = time.monotonic() + PATIENCE_S
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.02)


CHILDREN = """
import os, subprocess, sys, threading, time
from pathlib import Path
from mpiddp.launch.starters.command import RankStarter
from mpiddp.launch.starters.table import STARTERS
from mpiddp.launch.supervise.mpirun import MpirunProcess
from mpiddp.launch.streams.output import JobOutput
outputs = JobOutput("none", 1)
starter = RankStarter(STARTERS[1], "5.0.11", Path("sleep"))
mpirun = MpirunProcess(["sleep", "1000"], dict(os.environ), outputs, starter)
own = subprocess.Popen(["false"])
os.waitid(os.P_PID, own.pid, os.WEXITED | os.WNOWAIT)
mpirun.reap_adopted()
print(own.wait())
mpirun.kill_all()
while mpirun.code is None: time.sleep(0.01)
outputs.finish()
"""


def test_the_loop_leaves_the_programs_of_a_look_to_it() -> None:
    """It collects what mpirun has left behind, and would lose their exit codes."""
    done = run_program(CHILDREN)
    assert (done.stdout, done.stderr) == ("1\n", "")
