"""Verdicts about scripts whose undisturbed runs differ, from records alone.

Tests mpiddp/drill/verdict.py.
python -m pytest tests/unit/drill/test_drill_verdict.py
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpiddp.drill.faults import FAULTS
from mpiddp.drill.records import Attempt, History, Recording, State
from mpiddp.drill.rehearse import Rehearsal
from mpiddp.drill.verdict import first_difference, judge

KILL = FAULTS[0]
SAVE = {"step": 2, "in_handler": False, "path": "/x/a.pt"}


def state(step: int, scale: float) -> State:
    """After a step of a run that makes other random choices than one of another `scale`."""
    return {
        "weights": f"{step} {scale}",
        "optimizer": "",
        "buffers": "",
        "random": f"{step} {scale}",
        "norms": [scale],
        "rates": [0.1],
        "samples": [step],
    }


def attempt(first: int, last: int, scale: float) -> Attempt:
    before = state(first, scale) | {"is_of_model": True}
    steps = [state(step, scale) for step in range(first + 1, last + 1)]
    return Attempt(0, "node0", 0.0, before, steps, [SAVE])


def rehearsal(*attempts: Attempt) -> Rehearsal:
    codes: list[int | None] = [1] * (len(attempts) - 1) + [0]
    said = [""] * len(codes)
    return Rehearsal(True, "", codes, said, 0, {}, 1.0, Recording([History([*attempts])]))


WHOLE = rehearsal(attempt(0, 4, 1.0))
KILLED = rehearsal(attempt(0, 3, 1.1), attempt(2, 4, 1.1))


@pytest.mark.parametrize(("of_another_run", "passes"), [(1.1, True), (1.01, False)])
def test_runs_that_differ_anyway(of_another_run: float, passes: bool) -> None:
    """A resumed run may differ as much as two undisturbed ones."""
    assert first_difference(WHOLE, KILLED) == 0
    result = judge(KILL, WHOLE, KILLED, lambda: rehearsal(attempt(0, 4, of_another_run)))
    assert result.passed == passes
    expected = "the weights at the end differ by 9.1e-02, those of two undisturbed runs by 9.9e-03"
    assert result.cause == ("" if passes else expected)


def test_runs_that_agree_up_to_the_fault() -> None:
    other = rehearsal(attempt(0, 3, 1.0), attempt(2, 4, 1.0))
    assert first_difference(WHOLE, other) is None
    result = judge(KILL, WHOLE, other, lambda: WHOLE)
    assert (result.passed, result.difference, result.steps_lost) == (True, 0.0, 1)


def test_an_error_in_colour() -> None:
    """torch prints some of its errors in bold."""
    said = ["", "_pickle.UnpicklingError: Weights only load failed. \x1b[1mdo those steps\x1b[0m"]
    other = replace(rehearsal(attempt(0, 3, 1.0), attempt(2, 4, 1.0)), codes=[1, 1], said=said)
    cause = judge(KILL, WHOLE, other, lambda: WHOLE).cause
    assert cause.startswith(
        "the resumed run ended with code 1: _pickle.UnpicklingError: Weights only load failed. do those"
    )


def test_an_input_that_a_resume_refuses() -> None:
    said = ["", "mpiddp: no hosts given: using this machine\nthe checkpoint has other options.\n"]
    other = replace(rehearsal(attempt(0, 3, 1.0), attempt(2, 4, 1.0)), codes=[1, 2], said=said)
    cause = judge(KILL, WHOLE, other, lambda: WHOLE).cause
    assert cause == "the resumed run ended with code 2: the checkpoint has other options."
