"""What `mpiddp.spawn`'s launcher makes of a job's outcome, and what its caller gets.

Tests mpiddp/launch/launch_function.py.
python -m pytest tests/unit/launch/test_answers_to_a_caller.py
"""

from __future__ import annotations

import socket

import pytest

from mpiddp.errors import BAD_INPUT, DONE, FAILED, STOPPED
from mpiddp.launch.exchange import Exchange
from mpiddp.launch.launch_function import _final, _report
from mpiddp.launch.supervise.run import Outcome
from mpiddp.launch.supervise.verdict import FirstFailure
from mpiddp.protocol.payload import TO_CALLER, Payload, receive_payload

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


def test_a_failed_job_keeps_its_sentence() -> None:
    outcome = Outcome(FAILED, "rank 1 on b failed first.", FIRST)
    assert _final(outcome, exchange()) == outcome


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
