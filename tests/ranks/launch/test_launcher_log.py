"""What the launcher prints: no rank controls the terminal or forges a line of the launcher.

Tests mpiddp/launch/log.py, mpiddp/launch/main.py.
python -m pytest tests/ranks/launch/test_launcher_log.py
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from mpiddp.cli import main
from tests.support.ranks import launch, own_lines, script

EVIL = "\x1b[2J\u202e\r\nmpiddp: all is well"


def test_a_quote_in_an_error_controls_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--mpirun", f"/nowhere/{EVIL}", "-n", "2", __file__]) == 2
    printed = capfd.readouterr().err
    assert printed.startswith("--mpirun /nowhere/\\x1b[2J\\u202e\\r\n")
    assert printed.endswith("\n")
    assert "\x1b" not in printed


FORGES = """
import sys
print("\\x1b[1mbold\\u202e", flush=True)
raise ValueError("\\x1b[2J\\r\\u202emischief")
"""


def test_a_scripts_own_output_is_unharmed(tmp_path: Any) -> None:
    done = launch("-H", "localhost:1", script(tmp_path, FORGES))
    assert done.returncode == 1
    assert done.stdout == "\x1b[1mbold\u202e\n"
    assert "ValueError: \x1b[2J" in done.stderr  # Python's traceback
    (line,) = [line for line in done.stderr.split("\n") if line.startswith("mpiddp: ")]
    assert r"failed first: ValueError: \x1b[2J\r\u202emischief" in line


# Prints the names of the programs whose arguments contain a value, and stops.
STOPS = """
import os
from pathlib import Path
for entry in Path("/proc").glob("[0-9]*/cmdline"):
    try:
        arguments = entry.read_bytes().split(b"\\0")
    except OSError:
        continue
    if b"private-value" in b" ".join(arguments):
        print("launcher" if b"launch" in arguments else arguments, flush=True)
print(os.environ["A"], os.environ["B"])
raise SystemExit(75)
"""


def test_no_value_of_a_variable_is_printed(tmp_path: Any) -> None:
    options = ["-H", "localhost:1", "-x", "A=private-value-1", "-xB=private-value-2"]
    path = script(tmp_path, STOPS)
    done = launch(*options, path, "-x", "C=d", B="private-value-2")
    assert done.returncode == 75, done.stderr
    assert done.stdout.splitlines() == ["launcher", "private-value-1 private-value-2"]
    assert own_lines(done.stderr) == [
        f"mpiddp: to resume: mpiddp launch -H localhost:1 -x A=… -xB {path} -x C=d",
        "mpiddp: … stands for values that are never printed here. Fill in: A",
    ]
    dry = launch("--dry-run", *options, path, B="private-value-2")
    assert "private-value" not in dry.stdout + dry.stderr
    # The shell that the command is pasted into has B.
    assert re.search(r"^A=… (?!.* B=).*mpirun .* -x A -x B ", dry.stdout)
    assert "… stands for values that are never printed here. Fill in: A\n" in dry.stderr


def test_a_quiet_launcher_prints_its_errors_alone(tmp_path: Any) -> None:
    fails = script(tmp_path, 'import os\nprint("hi", flush=True)\nraise SystemExit(3)')
    arguments = ("-n", "1", "--max-restarts", "1", fails)  # no host is named, which has a hint
    verdict = r"mpiddp: rank 0 on \S+ failed first: exit code 3\.|mpiddp: rank 0 on \S+ ended .*"
    quiet = launch("--quiet", *arguments)
    assert (quiet.returncode, quiet.stdout) == (1, "hi\nhi\n")
    assert all(re.match(verdict, line) for line in own_lines(quiet.stderr)), quiet.stderr
    assert len(own_lines(quiet.stderr)) == 2  # of each attempt
    stops = script(tmp_path, "raise SystemExit(75)")
    assert launch("-q", "-n", "1", stops).stderr == ""
    assert "not allowed with" in launch("-q", "-v", "-n", "1", stops).stderr
