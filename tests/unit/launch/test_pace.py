"""Which rank is a straggler, and when the launcher says so.

Tests mpiddp/launch/{pace,watch}.py.
python -m pytest tests/unit/launch/test_pace.py
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mpiddp.launch.events import Event, Record
from mpiddp.launch.pace import WINDOW_S
from mpiddp.launch.watch import find_stragglers, straggler_sentence
from tests.support.channels import progress


class Job:
    """Ranks that make steps, a clock, and what is said of their windows."""

    def __init__(self, ranks: int = 4) -> None:
        self.now = 0.0
        self.step = 0
        self.record = Record(["a"] * ranks, at=0.0)
        self.own_s = dict.fromkeys(range(ranks), 0.0)
        self._reported_at = 0.0
        self._looked_at = 0.0

    def look(self, now: float) -> str:
        """What is said at the end of a window."""
        self.record.add(Event("window", facts=find_stragglers(self.record, now), at=now))
        return straggler_sentence(self.record, is_chronic=True)[1]

    def steps(self, count: int, own_s: Sequence[float], step_s: float | None = None) -> list[str]:
        """What is said during so many steps, in which the slowest rank makes the others wait.

        Args:
            own_s: of each rank in a step.
        """
        said = []
        for _ in range(count):
            self.now += step_s or max(own_s) * 1.05
            self.step += 1
            for rank, own in enumerate(own_s):
                self.own_s[rank] += own
            if self.now - self._reported_at >= 0.5:
                self._reported_at = self.now
                for rank, worked_s in self.own_s.items():
                    facts = progress(self.step, own_s=worked_s)
                    self.record.add(Event("progress", rank, facts, self.now))
            while self._looked_at + WINDOW_S <= self.now:
                self._looked_at += WINDOW_S
                said.append(self.look(self._looked_at))
        return [sentence for sentence in said if sentence]


def test_a_slow_rank_is_named_after_half_a_minute() -> None:
    job = Job()
    assert job.steps(275, [0.05, 0.05, 0.1, 0.04]) == []
    assert job.steps(100, [0.05, 0.05, 0.1, 0.04]) == [
        "rank 2 on a is a straggler: it works for 100 ms in a step of 105 ms, "
        "2.0 times as long as the others."
    ]


def test_ranks_whose_phases_have_no_waiting_are_judged_by_their_cores() -> None:
    """A sharded model waits within its passes, so those take as long on every rank."""
    record = Record(["a"] * 3, at=0.0)
    for step in (10, 20, 30):
        for rank in range(3):
            phases = {"data": 0.01, "forward": 0.04, "backward": 0.1, "waiting": 0.0}
            told = {name: seconds * step for name, seconds in {**phases, "optimizer": 0.01}.items()}
            own_s = (0.15 if rank == 1 else 0.03) * step
            facts = {**progress(step, own_s=own_s), "phases": {"steps": step, **told}}
            record.add(Event("progress", rank, facts, 0.16 * step))
    found = find_stragglers(record, 5.0)
    assert found["ranks"] == [1]
    works = "works for 150 ms in a step of 160 ms, 5.0 times as long as the others."
    assert found["works"] == works


@pytest.mark.parametrize(
    ("own_s", "step_s"),
    [
        ([0.1, 0.1, 0.12, 0.1], None),  # too little
        ([0.1, 0.1, 0.1, 0.1], None),  # waiting for GPUs, which uses the cores
        ([0.001, 0.001, 0.03, 0.001], 0.2),  # a disk or a GPU takes the time of all ranks
    ],
)
def test_equal_ranks_are_not_named(own_s: list[float], step_s: float | None) -> None:
    assert Job().steps(2000, own_s, step_s) == []


def test_ranks_that_do_not_wait_for_each_other_are_not_compared() -> None:
    record = Record(["a"] * 2, at=0.0)
    for second in range(100):
        for rank, steps in ((0, 10), (1, 100)):
            facts = progress(steps * second, own_s=second)
            record.add(Event("progress", rank, facts, float(second)))
        if second > 1:
            assert find_stragglers(record, second)["ranks"] == []


def test_a_straggler_is_named_while_others_come_and_go() -> None:
    job, said = Job(), []
    for window in range(12):
        own_s = [0.1] * 4
        own_s[1], own_s[(0, 2, 3)[window % 3]] = 0.9, 0.8
        said += job.steps(11, own_s)
    assert {line.partition(":")[0] for line in said} == {"rank 1 on a is a straggler"}


def test_nobody_is_slow_in_a_job_that_makes_no_steps() -> None:
    job = Job()
    job.steps(600, [0.1, 0.1, 0.1, 0.3])
    assert straggler_sentence(job.record)[1]
    assert not job.look(job.now + 1000)
    assert not straggler_sentence(job.record)[1]
