"""Viewers of a job: a console as the launcher has it, without ranks, and the verbs in processes of their own.

Tests mpiddp/watch/, mpiddp/launch/{control,status}.py.
"""

import os
import pty
import re
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager

import pytest

from mpiddp.cli import main
from mpiddp.launch.judge.events import Record
from mpiddp.launch.run.control import Console
from mpiddp.launch.run.status import job_facts
from mpiddp.protocol.channel import VIEW_JOB, VIEW_STACKS, viewed_folders
from mpiddp.protocol.group import TimedSelector
from mpiddp.protocol.server import ChannelServer, Event
from mpiddp.watch import running_jobs
from tests.support.channels import progress
from tests.support.errors import error
from tests.support.ranks import ROOT, clean_env
from tests.support.terminal import in_a_terminal

PID = str(os.getpid())  # of the launcher, which is this process
# The job is viewed.py: other tests run a train.py at the same time.
# Of rank 1: more lines than a terminal, and another thread.
STACK = "\n".join(["thread MainThread:", "line 1\x1b", *(f"line {n}" for n in range(2, 41))])


@pytest.fixture(name="folder")
def private_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


@contextmanager
def serving(console):
    """A thread that answers as a launcher does: a job of two ranks on the hosts a and b.

    It answers nobody while the event that it yields is set.
    """
    record = Record(("a", "b"))
    for rank in (0, 1):
        record.add(Event("progress", rank, progress(5 + rank), 1.0))
    facts = job_facts(record, {0: b"loss 0.5\n"}, 2.0) | {"phase": "running"}
    answers = {
        VIEW_JOB: facts,
        VIEW_STACKS: {"sentence": "both wait.", "stacks": {1: f"{STACK}\n\nthread 2:"}},
    }
    is_over, is_between = threading.Event(), threading.Event()

    def run():
        with TimedSelector() as selector, socket.create_server(("127.0.0.1", 0)) as ranks:
            server = ChannelServer(ranks, "a key", 2, selector)
            selector.register(console.listener, selectors.EVENT_READ, console.listener)
            while not is_over.wait(0.01):
                for key, _ in [] if is_between.is_set() else selector.select(0):
                    for message in server.receive(key.data):
                        console.answer(message.facts["viewer"], **answers[message.kind])
            server.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield is_between
    finally:
        is_over.set()
        thread.join()
        console.close()


@pytest.fixture(name="job")
def a_job(folder):
    with serving(Console("viewed.py")):
        yield folder


def test_a_launcher_that_starts_does_not_answer(folder, monkeypatch, capsys):
    for limit in ("_ANSWER_S", "_STACKS_S"):
        monkeypatch.setattr(running_jobs, limit, 0.5)
    with ExitStack() as open_ones:
        open_ones.callback(Console("viewed.py").close)
        for verb in ("top", "stacks"):
            assert main([verb, PID]) == 2
            said = capsys.readouterr().err
            assert re.search(error("it starts, restarts", f"job {PID} "), said)
        for _ in range(19):
            open_ones.callback(Console("viewed.py").close)
        begun = time.monotonic()
        assert main(["ps"]) == 0
        assert time.monotonic() - begun < 20 * 0.5  # one wait for all
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert [line[-3:] for line in lines if PID in line] == [["no", "answer", "-"]] * 20
    assert not [*folder.glob("mpiddp/*/*")]


def test_top_outlives_a_restart_and_ends_with_the_job(folder):
    """Nobody answers before new agents have started."""
    command = (sys.executable, "-m", "mpiddp", "top", PID)
    job = rf"viewed\.py \(pid {PID}\), "
    with ExitStack() as stack:
        with serving(Console("viewed.py")) as is_between:
            top = stack.enter_context(in_a_terminal(*command, cwd=ROOT)).until(f"{job}running")
            is_between.set()
            top.until(f"{job}no answer, 2 ranks")
            is_between.clear()
            top.until(rf"{job}no answer[\s\S]*{job}running")
        top.until(rf"job {PID} \(viewed\.py\) has ended\.")
        assert top.wait() == 0


# Other tests' jobs run at the same time; here the only one is this process's.
ONLY_JOB = f"""
import sys
from mpiddp import cli
from mpiddp.watch import stop_and_stacks
from mpiddp.watch.running_jobs import find_job
stop_and_stacks.find_job = lambda name: find_job("{PID}")
sys.exit(cli.main(["stop"]))
"""


def stop_without_a_name(stdin):
    command = [sys.executable, "-c", ONLY_JOB]
    return subprocess.run(command, env=clean_env(), stdin=stdin, capture_output=True, text=True)


def test_stop_without_a_name_asks_on_a_terminal_and_needs_one_elsewhere(job):
    signals: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    try:
        done = stop_without_a_name(subprocess.DEVNULL)
        assert done.returncode == 2
        assert re.search(error("at a terminal", f": mpiddp stop {PID}"), done.stderr)
        for answer, count in (("", 0), ("n", 0), ("y", 1)):
            ours, theirs = pty.openpty()
            os.write(ours, f"{answer}\n".encode())
            done = stop_without_a_name(theirs)
            os.close(ours)
            os.close(theirs)
            assert done.stdout.startswith(f"stop job {PID} (viewed.py)? [y/N] ")
            assert (done.returncode, len(signals)) == (0, count)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("folder")
def test_a_folder_that_others_may_enter_is_no_job():
    """Another user may make a folder of any name in /tmp."""
    others = viewed_folders()[0].with_name("job-0")
    others.mkdir(parents=True)
    others.chmod(0o777)
    assert others / "job" not in running_jobs.sockets()
