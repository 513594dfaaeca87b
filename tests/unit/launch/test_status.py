"""What stands below the output on a terminal.

Tests mpiddp/launch/ranks.py.
python -m pytest tests/unit/launch/test_status.py
"""

from __future__ import annotations

from typing import Any

from mpiddp.launch.ranks import Ranks, status_lines
from mpiddp.protocol.channel import is_valid
from mpiddp.protocol.server import Message
from tests.support.channels import progress


def report(ranks: Ranks, rank: int, step: int, at: float, **shown: Any) -> None:
    facts = {**progress(step), **({"shown": shown} if shown else {})}
    assert is_valid("progress", facts)
    ranks.note(Message(rank, "progress", facts, at))


def test_there_is_no_status_before_the_first_step() -> None:
    assert status_lines(Ranks(["a", "b"]), 1, "", 0.0) == []


def test_the_status_says_how_far_the_training_is() -> None:
    ranks = Ranks(["a", "a", "b"])
    report(ranks, 0, 1000, 0.0, total=4000, loss=0.123456, epoch=3, phase="warm-up\x1b[2J")
    report(ranks, 1, 1000, 0.0, loss=9.0)
    report(ranks, 0, 1100, 10.0)
    assert status_lines(ranks, 2, "rank 2 on b holds the others up: it works", 10.0) == [
        "step 1,100/4,000 (28%)  10 steps/s  5 min left  epoch 3  loss 0.1235  phase warm-up\\x1b[2J",
        "3 ranks on 2 hosts  attempt 2  1.1 GB a rank  rank 2 on b holds the others up",
    ]
    report(ranks, 0, 4001, 20.0)
    assert status_lines(ranks, 1, "", 20.0)[0].startswith("step 4,001  ")


def test_a_training_of_no_steps_and_numbers_that_are_none_have_a_status() -> None:
    ranks = Ranks(["a"])
    report(ranks, 0, 0, 0.0, total=0, loss=float("nan"))
    assert status_lines(ranks, 1, "", 0.0)[0] == "step 0  loss nan"
    report(ranks, 0, 1, 1.0, total=(1 << 63) - 1)
    assert status_lines(ranks, 1, "", 1.0)[0].startswith(
        "step 1/9,223,372,036,854,775,807 (0%)  1 steps/s"
    )


def test_the_status_says_when_the_job_saves() -> None:
    ranks = Ranks(["a"])
    report(ranks, 0, 1, 0.0)
    ranks.note(Message(0, "saving", {"active": True}, 5.0))
    assert status_lines(ranks, 1, "", 6.0)[1] == "1 rank on 1 host  1.1 GB a rank  saving"
    ranks.note(Message(0, "saving", {"active": False}, 7.0))
    assert status_lines(ranks, 1, "", 40.0)[1] == "1 rank on 1 host  1.1 GB a rank  saved 33 s ago"
