"""A quote of a rank, and the name of a host or a log, is one line that controls nothing.

Tests mpiddp/launch/log.py, mpiddp/launch/main.py.
python -m pytest tests/unit/launch/test_quoted_lines.py
"""

from __future__ import annotations

from typing import Any

import pytest

from mpiddp.launch import log
from mpiddp.launch.ranks import Ranks
from mpiddp.launch.stacks import missing_sentence, stuck_sentences
from mpiddp.launch.verdict import History, MpirunEnd, verdict
from mpiddp.protocol.server import Message

EVIL = "\x1b[2J\u202e\r\nmpiddp: all is well"


def message(kind: str, **facts: Any) -> Message:
    return Message(0, kind, facts, 1.0)


def failed(state: Ranks, **facts: Any) -> str:
    """The verdict on a rank that has failed."""
    defaults = {"code": 1, "error": EVIL, "traceback": "", "is_verdict": False}
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
    found += [missing_sentence(state, 3), *stuck_sentences(state, 3)]
    state.note(message("stacks", cpu_s=0.0, state="S", text=stack, step=3))
    found += [missing_sentence(state, 3), *stuck_sentences(state, 3)]
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
