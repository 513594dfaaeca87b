"""`observe_exit` returns the exception or exit code that ended a script.

Tests mpiddp/runtime/job/script_exit.py, and the end of a script alone in mpiddp/checkpoints/ranks.py.
python -m pytest tests/unit/runtime/test_script_exit.py
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.patience import PATIENCE_S
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
    done = subprocess.run(
        command, env=clean_env(), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stdout == f"{expected}\n", done.stderr
