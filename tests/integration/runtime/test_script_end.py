"""A script whose end raises does not succeed, under a launcher and alone.

Tests mpiddp/runtime/join.py, and the end of a script alone in mpiddp/checkpoints/checkpoints.py.
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
