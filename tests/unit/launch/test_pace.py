"""Which rank is a straggler, and when the launcher says so.

Tests mpiddp/launch/ranks.py.
python -m pytest tests/unit/launch/test_pace.py
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mpiddp.launch.ranks import Pace, Ranks, find_stragglers, straggler_sentence
from mpiddp.launch.watch import Watch
from mpiddp.protocol.server import Message
from tests.support.channels import progress


class Job:
    """Ranks that make steps, a clock, and what the watch says of them."""

    def __init__(self, ranks: int = 4) -> None:
        self.now = 0.0
        self.step = 0
        self.ranks = Ranks(["a"] * ranks)
        self.own_s = dict.fromkeys(range(ranks), 0.0)
        self.watch = Watch(self.ranks, 0.0)
        self.said: list[str] = []
        self._reported_at = 0.0
        self._looked_at = 0.0

    def steps(self, count: int, own_s: Sequence[float], step_s: float | None = None) -> list[str]:
        """What is said during so many steps, in which the slowest rank makes the others wait.

        Args:
            own_s: of each rank in a step.
        """
        self.said = []
        for _ in range(count):
            self.now += step_s or max(own_s) * 1.05
            self.step += 1
            for rank, own in enumerate(own_s):
                self.own_s[rank] += own
            if self.now - self._reported_at >= 0.5:
                self._reported_at = self.now
                for rank, worked_s in self.own_s.items():
                    facts = progress(self.step, own_s=worked_s)
                    self.ranks.note(Message(rank, "progress", facts, self.now))
            while self._looked_at + 1 <= self.now:
                self._looked_at += 1
                if sentence := self.watch.judge_steps(self._looked_at):
                    self.said.append(sentence)
        return self.said


def test_a_slow_rank_is_named_once_after_half_a_minute() -> None:
    job = Job()
    assert job.steps(275, [0.05, 0.05, 0.1, 0.04]) == []
    assert job.steps(2000, [0.05, 0.05, 0.1, 0.04]) == [
        "rank 2 on a is a straggler: it works for 100 ms in a step of 105 ms, "
        "2.0 times as long as the others."
    ]
    assert job.steps(2000, [0.05, 0.05, 0.1, 0.04]) == []


def test_ranks_whose_phases_have_no_waiting_are_judged_by_their_cores() -> None:
    """A sharded model waits within its passes, so those take as long on every rank."""
    ranks = Ranks(["a"] * 3)
    paces = ranks.paces = {rank: Pace() for rank in range(3)}
    for step in (10, 20, 30):
        for rank, pace in paces.items():
            phases = {"data": 0.01, "forward": 0.04, "backward": 0.1, "waiting": 0.0}
            told = {name: seconds * step for name, seconds in {**phases, "optimizer": 0.01}.items()}
            own_s = (0.15 if rank == 1 else 0.03) * step
            pace.add(
                0.16 * step, {**progress(step, own_s=own_s), "phases": {"steps": step, **told}}
            )
    assert straggler_sentence(ranks, *find_stragglers(ranks)) == (
        "rank 1 on a is a straggler: it works for 150 ms in a step of 160 ms, 5.0 times as long as the "
        "others."
    )


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
    ranks = Ranks(["a"] * 2)
    paces = ranks.paces = {0: Pace(), 1: Pace()}
    for second in range(100):
        paces[0].add(second, progress(10 * second, own_s=second))
        paces[1].add(second, progress(100 * second, own_s=second))
        if second > 1:
            assert find_stragglers(ranks) == ([], "")


def test_a_straggler_is_named_while_others_come_and_go() -> None:
    job, said = Job(), []
    for window in range(12):
        own_s = [0.1] * 4
        own_s[1], own_s[(0, 2, 3)[window % 3]] = 0.9, 0.8
        said += job.steps(11, own_s)
    assert [line.partition(":")[0] for line in said] == ["rank 1 on a is a straggler"]


def test_nobody_is_slow_in_a_job_that_makes_no_steps() -> None:
    job = Job()
    job.steps(600, [0.1, 0.1, 0.1, 0.3])
    assert job.watch.straggler
    for later in (1000, 2000):
        job.watch.judge_steps(job.now + later)
    assert not job.watch.straggler
