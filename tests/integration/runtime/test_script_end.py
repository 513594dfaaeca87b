"""A script whose end raises does not succeed, under a launcher and alone.

Tests mpiddp/runtime/join.py and script.py, and the end of a script alone in checkpoints/checkpoints.py.
python -m pytest tests/integration/runtime/test_script_end.py
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT, clean_env

LEAVES = """
import contextlib
from mpiddp.runtime.join import enter_until_exit
@contextlib.contextmanager
def job():
    yield
    finish()
"""


ALONE = "from mpiddp.checkpoints.checkpoints import script_coordinator\n"


@pytest.mark.parametrize(
    "script",
    [f"{LEAVES}enter_until_exit(job())\n", f"{ALONE}script_coordinator(lambda: finish())\n"],
    ids=["one of several ranks", "alone"],
)
def test_a_script_whose_end_raises_does_not_succeed(script: str) -> None:
    """Python itself would print the error of a handler of atexit, and exit with code 0."""
    finish = "def finish():\n    raise ValueError('a bug')\n"
    command = [sys.executable, "-c", f"{script}{finish}print('ends', flush=True)"]
    done = subprocess.run(
        command, env=clean_env(), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stdout) == (1, "ends\n"), done.stderr
    assert done.stderr.startswith("Traceback (most recent call last):\n")
    assert done.stderr.splitlines()[-1] == "ValueError: a bug"


CHILDREN = """
import multiprocessing, os, signal, subprocess, time
from mpiddp.runtime.script import leave_sigterm_to_rank

def works(ready, own):
    if own:
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(7))
    ready.set()
    while True:
        time.sleep(0.01)

def started(own):
    ready = context.Event()
    child = context.Process(target=works, args=(ready, own), daemon=True)
    child.start()
    ready.wait()
    return child

leave_sigterm_to_rank()
context = multiprocessing.get_context("fork")
own = started(True)
subprocess.run(["kill", "-TERM", str(own.pid)])
own.join()
print("own handler:", own.exitcode)
other = started(False)
os.kill(other.pid, signal.SIGSTOP)
os.waitpid(other.pid, os.WUNTRACED)
subprocess.run(["kill", "-TERM", str(other.pid)])  # the kernel now drops another one
subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {other.pid}"])
print("left")
"""


def test_children_of_a_rank_end_at_its_end_and_keep_their_own_handler_of_sigterm() -> None:
    """Although a stranger's SIGTERM hides that of the rank."""
    command = [sys.executable, "-c", CHILDREN]
    done = subprocess.run(
        command, env=clean_env(), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "own handler: 7\nleft\n", "")
