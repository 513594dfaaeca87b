"""What `mpiddp.spawn`'s launcher makes of a job's outcome, and what its caller gets.

Tests mpiddp/launch/launch_function.py.
python -m pytest tests/unit/launch/test_answers_to_a_caller.py
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpiddp.errors import BAD_INPUT, DONE, FAILED, INTERRUPTED, STOPPED
from mpiddp.launch.attempt import Outcome
from mpiddp.launch.exchange import Answer, Exchange, messages_over
from mpiddp.launch.launch_function import _final, _report, _with_variables
from mpiddp.launch.options import parse_options
from mpiddp.launch.verdict import FirstFailure
from mpiddp.protocol.channel import encode
from tests.support.an_mpirun import an_mpirun
from tests.support.errors import error
from tests.support.patience import PATIENCE_S

RESULT = ("result", "")
FIRST = FirstFailure(1, "b", "KeyError: 3")


def exchange(*answers: tuple[int, tuple[str, str]]) -> Exchange:
    found = Exchange(b"function", 100)
    found.world_size = 2
    found.answers = {rank: Answer(*said, b"body %d" % rank) for rank, said in answers}
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


def test_a_failed_job_keeps_its_sentence() -> None:
    outcome = Outcome(FAILED, "rank 1 on b failed first.", FIRST)
    assert _final(outcome, exchange()) == outcome


def test_a_refusal_has_the_sentence_of_the_lowest_rank() -> None:
    refusals = [(rank, ("refusal", f"no {rank}.")) for rank in (1, 0)]
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
        ours.close()
        *answers, (last, _) = messages_over(theirs)
    assert answers == [
        ({"type": "answer", "rank": rank, "form": "result", "text": ""}, b"body %d" % rank)
        for rank in ranks
    ]
    assert last == {
        "type": "outcome",
        "code": outcome.code,
        **dict(zip(("sentence", "rank", "host"), final, strict=True)),
    }


def test_variables_of_the_caller_are_exported() -> None:
    options = parse_options(["-x", "A=1", "-m", "x"])
    assert _with_variables(options, {"B": "2", "C": "a=b"}).exports == ("A=1", "B=2", "C=a=b")


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
    caller.sendall(encode("call", b"function", options=options, env={}, max_result_bytes=1))


Caller = tuple[socket.socket, "subprocess.Popen[bytes]"]


def test_a_caller_that_says_nothing_has_no_job(caller: Caller) -> None:
    ours, launcher = caller
    ours.close()
    assert launcher.wait(PATIENCE_S) == FAILED


def test_a_wrong_option_is_the_outcome(caller: Caller, tmp_path: Path) -> None:
    ours, launcher = caller
    call(ours, "--mpirun", an_mpirun(tmp_path), "-H", "localhost:1", "-n", "2")
    facts, _ = next(messages_over(ours))
    sentence = error("slots of", "-n 2 ", " 1 slots ", "-H (localhost=1)")
    assert re.fullmatch(sentence, facts.pop("sentence"))
    assert facts == {"type": "outcome", "code": BAD_INPUT, "rank": None, "host": ""}
    assert launcher.wait(PATIENCE_S) == BAD_INPUT


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
    facts, _ = next(messages_over(ours))
    assert (facts["code"], facts["sentence"]) == (INTERRUPTED, "interrupted.")
    assert launcher.wait(PATIENCE_S) == INTERRUPTED
