"""What `mpiddp.spawn`'s launcher makes of a job's outcome.

Tests mpiddp/launch/launch_function.py.
python -m pytest tests/unit/launch/test_answers_to_a_caller.py
"""

from __future__ import annotations

import pytest

from mpiddp.errors import BAD_INPUT, DONE, FAILED, STOPPED
from mpiddp.launch.exchange import Answer, Exchange
from mpiddp.launch.launch_function import _final
from mpiddp.launch.verdict import FirstFailure, Outcome

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


def test_a_refusal_has_the_sentence_of_the_lowest_rank() -> None:
    refusals = [(rank, ("refusal", f"no {rank}.")) for rank in (1, 0)]
    assert _final(Outcome(BAD_INPUT, "x"), exchange(*refusals)).sentence == "no 0."
    assert _final(Outcome(BAD_INPUT, "x"), exchange((0, RESULT))).sentence == "x"
    assert _final(Outcome(BAD_INPUT, "", FIRST), exchange()).sentence == "KeyError: 3"
    assert _final(Outcome(BAD_INPUT, ""), exchange()).sentence == ""
