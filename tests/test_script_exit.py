"""What ended a script is known at its exit, whatever way it ended.

Tests mpiddp/runtime/script_exit.py.
python -m pytest tests/test_script_exit.py
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.ranks import ROOT, clean_env

BEFORE = """
import atexit, sys
from mpiddp.runtime.script_exit import observe_exit
def init():
    ending_error = observe_exit()
    atexit.register(lambda: print(repr(ending_error())))
init()
def main():
    return 4
"""


@pytest.mark.parametrize(
    ("ends", "known"),
    [
        ("", "None"),
        ("sys.exit(3)", "SystemExit(3)"),
        ("sys.exit(main())", "SystemExit(4)"),
        ("sys.exit()", "SystemExit(None)"),
        ("sys.exit('a word')", "SystemExit('a word')"),
        ("1 / 0", "ZeroDivisionError('division by zero')"),
        ("try: sys.exit(3)\nexcept SystemExit: pass", "None"),
        ("try: sys.exit(3)\nexcept SystemExit: pass\nsys.exit(0)", "SystemExit(0)"),
    ],
)
def test_what_ended_a_script(ends: str, known: str) -> None:
    command = [sys.executable, "-c", f"{BEFORE}{ends}"]
    done = subprocess.run(command, env=clean_env(), cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == f"{known}\n", done.stderr
