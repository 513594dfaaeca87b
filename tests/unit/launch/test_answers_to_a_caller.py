"""What `mpiddp.spawn`'s launcher makes of a job's outcome, and what its caller gets.

Tests mpiddp/launch/launch_function.py.
python -m pytest tests/unit/launch/test_answers_to_a_caller.py
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mpiddp.errors import BAD_INPUT, DONE, FAILED, INTERRUPTED, STOPPED
from mpiddp.launch.attempt import Outcome
from mpiddp.launch.exchange import Exchange
from mpiddp.launch.launch_function import _final, _report
from mpiddp.launch.verdict import FirstFailure
from mpiddp.protocol.payload import (
    TO_CALLER,
    TO_LAUNCHER,
    Payload,
    receive_payload,
    send_payload,
)
from tests.support.patience import PATIENCE_S

RESULT = {"kind": "result"}
FIRST = FirstFailure(1, "b", "KeyError: 3")


def exchange(*answers: tuple[int, dict[str, str]]) -> Exchange:
    found = Exchange(Payload({"name": "work"}, b""), 100)
    found.begin("secret", 2)
    found.answers.update({rank: Payload(facts, b"body %d" % rank) for rank, facts in answers})
    return found


@pytest.mark.parametrize("code", [DONE, STOPPED])
def test_a_rank_without_a_result_makes_the_job_fail(code: int) -> None:
    both = exchange((0, RESULT), (1, RESULT))
    assert _final(Outcome(code), both) == Outcome(code)
    assert _final(Outcome(code), exchange((0, RESULT))) == Outcome(
        FAILED, "rank 1 ended without a result."
    )
    neither = _final(Outcome(code), exchange())
    assert neither.sentence == "rank 0 and rank 1 ended without a result."


def test_a_refusal_has_the_sentence_of_the_lowest_rank() -> None:
    refusals = [(rank, {"kind": "refusal", "sentence": f"no {rank}."}) for rank in (1, 0)]
    assert _final(Outcome(BAD_INPUT, "x"), exchange(*refusals)).sentence == "no 0."
    assert _final(Outcome(BAD_INPUT, "x"), exchange((0, RESULT))).sentence == "x"
    assert _final(Outcome(BAD_INPUT, "", FIRST), exchange()).sentence == "KeyError: 3"
    assert _final(Outcome(BAD_INPUT, ""), exchange()).sentence == ""


@pytest.mark.parametrize(
    ("outcome", "ranks", "final"),
    [
        (Outcome(DONE), [0, 1], ("", None, "")),
        (Outcome(STOPPED, "stopped on request."), [0, 1], ("stopped on request.", None, "")),
        (Outcome(FAILED, "failed.", FIRST), [1], ("failed.", 1, "b")),
        (Outcome(FAILED, "failed."), [], ("failed.", None, "")),
    ],
)
def test_the_caller_gets_the_answers_and_the_outcome(
    outcome: Outcome, ranks: list[int], final: tuple[str, int | None, str]
) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        _report(outcome, exchange((1, RESULT), (0, RESULT)), ours)
        for rank in ranks:
            answer = receive_payload(theirs, "", TO_CALLER)
            assert answer.facts == {**RESULT, "rank": rank}
            assert bytes(answer.body) == b"body %d" % rank
        assert receive_payload(theirs, "", TO_CALLER).facts == {
            "kind": "outcome",
            "code": outcome.code,
            **dict(zip(("sentence", "rank", "host"), final, strict=True)),
        }


# --- the process ---


@pytest.fixture(name="caller")
def a_caller(tmp_path: Path) -> Iterator[tuple[socket.socket, subprocess.Popen[bytes]]]:
    """A caller's end of the socket, and its launcher."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "mpiddp", "launch-function", str(theirs.fileno())]
    env = {name: value for name, value in os.environ.items() if "MPI" not in name}
    with ours, theirs:
        launcher = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=env)
        theirs.close()
        try:
            yield ours, launcher
        finally:
            launcher.kill()
            launcher.wait(PATIENCE_S)


def call(caller: socket.socket, *options: str) -> None:
    facts: dict[str, Any] = {"options": options, "env": {}, "function": {}, "max_result_bytes": 1}
    send_payload(caller, Payload(facts, b""), "", TO_LAUNCHER)


Caller = tuple[socket.socket, "subprocess.Popen[bytes]"]


@pytest.mark.parametrize("is_interrupted", [True, False])
def test_a_launcher_ends_before_anything_has_started(
    caller: Caller, tmp_path: Path, is_interrupted: bool
) -> None:
    """By Ctrl-C, or with its caller: here while mpirun does not say what it is."""
    ours, launcher = caller
    program = tmp_path / "mpirun"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/asked; exec sleep 5\n")
    program.chmod(0o755)
    call(ours, "--mpirun", str(program), "-n", "1")
    deadline = time.monotonic() + PATIENCE_S
    while not (tmp_path / "asked").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if not is_interrupted:
        ours.close()
        assert launcher.wait(PATIENCE_S) == -signal.SIGTERM
        return
    launcher.send_signal(signal.SIGINT)
    facts = receive_payload(ours, "", TO_CALLER).facts
    assert (facts["code"], facts["sentence"]) == (INTERRUPTED, "interrupted.")
    assert launcher.wait(PATIENCE_S) == INTERRUPTED
