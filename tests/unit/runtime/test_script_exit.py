"""`observe_exit` returns the exception or exit code that ended a script.

Tests mpiddp/runtime/job/script_exit.py, and the end of a script alone in mpiddp/checkpoints/ranks.py.
python -m pytest tests/unit/runtime/test_script_exit.py
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.ranks import ROOT, clean_env

BEFORE = """
import atexit, sys
from mpiddp.runtime.job.script_exit import observe_exit
def init():
    ending_error = observe_exit()
    atexit.register(lambda: print(repr(ending_error())))
init()
def main():
    return 4
"""


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        ("", "None"),
        ("sys.exit(3)", "SystemExit(3)"),
        ("sys.exit(main())", "SystemExit(4)"),
        ("sys.exit()", "SystemExit(None)"),
        ("sys.exit('a text')", "SystemExit('a text')"),
        ("1 / 0", "ZeroDivisionError('division by zero')"),
        ("try: sys.exit(3)\nexcept SystemExit: pass", "None"),
        ("try: sys.exit(3)\nexcept SystemExit: pass\nsys.exit(0)", "SystemExit(0)"),
    ],
)
def test_observe_exit(ending: str, expected: str) -> None:
    command = [sys.executable, "-c", f"{BEFORE}{ending}"]
    done = subprocess.run(command, env=clean_env(), cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == f"{expected}\n", done.stderr


LEAVES = """
import contextlib
from mpiddp.runtime.job.script_exit import enter_until_exit
@contextlib.contextmanager
def job():
    yield
    finish()
"""
ALONE = "from mpiddp.checkpoints.ranks import script_coordinator\n"


@pytest.mark.parametrize(
    "script",
    [f"{LEAVES}enter_until_exit(job())\n", f"{ALONE}script_coordinator(lambda: finish())\n"],
    ids=["one of several ranks", "alone"],
)
def test_a_script_whose_end_raises_does_not_succeed(script: str) -> None:
    """Python itself would print the error of a handler of atexit, and exit with code 0."""
    finish = "def finish():\n    raise ValueError('a bug')\n"
    command = [sys.executable, "-c", f"{script}{finish}print('ends', flush=True)"]
    done = subprocess.run(command, env=clean_env(), cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "ends\n"), done.stderr
    assert done.stderr.startswith("Traceback (most recent call last):\n")
    assert done.stderr.splitlines()[-1] == "ValueError: a bug"
