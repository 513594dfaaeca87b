"""What the launcher prints: no rank controls the terminal or forges a line of the launcher.

Tests mpiddp/launch/log.py, mpiddp/launch/main.py.
python -m pytest tests/test_launcher_log.py
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from mpiddp.cli import main
from mpiddp.launch import log
from mpiddp.launch.supervise.ranks import Ranks
from mpiddp.launch.supervise.stacks import hang_sentences, missing_sentence
from mpiddp.launch.supervise.verdict import History, MpirunEnd, verdict
from mpiddp.protocol.server import Message
from tests.ranks import launch, own_lines, script

EVIL = "\x1b[2J\u202e\r\nmpiddp: all is well"


def message(kind: str, **facts: Any) -> Message:
    return Message(0, kind, facts, 1.0)


def failed(state: Ranks, **facts: Any) -> str:
    """The verdict on a rank that has failed."""
    defaults = {"code": 1, "error": EVIL, "traceback": "", "first": True, "is_verdict": False}
    state.failures.clear()
    state.note(message("failed", **{**defaults, **facts}))
    return verdict(History(state, MpirunEnd("mpirun", 1))).sentence


def sentences() -> list[str]:
    """Each sentence that quotes a rank."""
    state = Ranks(["a"])
    stack = f'thread MainThread:\n  File "{EVIL}", line 3, in {EVIL}\n    {EVIL}\n{EVIL}'
    found = [missing_sentence(state, 3)]
    state.note(message("started", host=EVIL, pid=1))
    state.note(message("log", path=EVIL))
    state.note(message("frames", text=f'Stack x\n  File "{EVIL}", line 3'))
    found += [missing_sentence(state, 3), *hang_sentences(state, 3)]
    state.note(message("stacks", text=stack, step=3))
    found += [missing_sentence(state, 3), *hang_sentences(state, 3)]
    for facts in ({}, {"traceback": "x"}, {"is_verdict": True}, {"code": 2}):
        found.append(failed(state, **facts) or EVIL)
    return found


def test_a_quote_of_a_rank_controls_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    for sentence in sentences():
        log.info(sentence)
        printed = capfd.readouterr().err
        assert printed.startswith("mpiddp: ")
        lines = printed.removesuffix("\n").split("\n")
        assert all(line.isprintable() for line in lines), lines
        assert all(line.startswith("  ") for line in lines[1:]), lines


def test_the_name_of_a_host_and_of_a_log_is_one_line() -> None:
    state = Ranks(["a"])
    state.note(message("started", host="a\nb", pid=1))
    state.note(message("log", path="/x\ny.log"))
    assert failed(state, traceback="x", error="ValueError: z\nmore") == (
        r"rank 0 on a\nb failed first: ValueError: z (its traceback: /x\ny.log)."
    )


def test_a_quote_in_an_error_controls_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--mpirun", f"/nowhere/{EVIL}", "-n", "2", __file__]) == 2
    printed = capfd.readouterr().err
    assert printed.startswith("--mpirun /nowhere/\\x1b[2J\\u202e\\r\n")
    assert "\x1b" not in printed


FORGES = """
import sys
print("\\x1b[1mbold\\u202e", flush=True)
raise ValueError("\\x1b[2J\\r\\u202emischief")
"""


@pytest.mark.quick
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


@pytest.mark.quick
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
