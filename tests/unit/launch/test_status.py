"""What stands below the output on a terminal.

Tests mpiddp/launch/status.py.
"""

from typing import Any

from mpiddp.launch.events import Record
from mpiddp.launch.status import status_lines
from mpiddp.protocol.channel import is_valid
from mpiddp.protocol.server import Event
from tests.support.channels import progress


def report(record: Record, rank: int, step: int, at: float, **shown: Any) -> None:
    facts = {**progress(step), **({"shown": shown} if shown else {})}
    assert is_valid("progress", facts)
    record.add(Event("progress", rank, facts, at))


def test_the_status_says_how_far_the_training_is():
    record = Record(["a", "a", "b"], attempt=2)
    report(record, 0, 1000, 0.0, total=4000, loss=0.123456, epoch=3, phase="warm-up\x1b[2J")
    report(record, 1, 1000, 0.0, loss=9.0)
    report(record, 0, 1100, 10.0)
    for _ in range(3):
        record.note("window", ranks=[2], share=0.4)
    assert status_lines(record, 10.0) == [
        "step 1,100/4,000 (28%)  10 steps/s  5 min left  epoch 3  loss 0.1235  phase warm-up\\x1b[2J",
        "3 ranks on 2 hosts  attempt 2  1.1 GB a rank  rank 2 on b is a straggler",
    ]
    report(record, 0, 4001, 20.0)
    assert status_lines(record, 20.0)[0].startswith("step 4,001  ")


def test_a_training_of_no_steps_and_numbers_that_are_none_have_a_status():
    record = Record(["a"])
    report(record, 0, 0, 0.0, total=0, loss=float("nan"))
    assert status_lines(record, 0.0)[0] == "step 0  loss nan"
    report(record, 0, 1, 1.0, total=(1 << 63) - 1)
    assert status_lines(record, 1.0)[0].startswith(
        "step 1/9,223,372,036,854,775,807 (0%)  1 steps/s"
    )
