"""Which rank is a straggler without using a core: by its data, a disk, a link or a sleep.

Tests mpiddp/launch/watch.py.
python -m pytest tests/unit/launch/test_idle_stragglers.py
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from mpiddp.launch.ranks import Ranks
from mpiddp.launch.watch import Watch
from mpiddp.protocol.messages import is_valid
from mpiddp.protocol.server import Message
from tests.support.channels import progress, stacks
from tests.unit.launch.test_watch import ALL_REDUCE, LOADS, OPENS, Frames, stack

SLEEPS: Frames = [("/home/me/train.py", 12, "hook", "time.sleep(0.1)")]
READS: Frames = [
    ("/home/me/train.py", 9, "main", "torch.load(path)"),
    ("/venv/lib/python3.11/site-packages/torch/serialization.py", 1, "load", "return _load()"),
]
AGREES: Frames = [
    ("/home/me/train.py", 20, "main", "mpiddp.should_stop()"),
    (
        "/venv/lib/python3.11/site-packages/mpiddp/runtime/job/channel.py",
        99,
        "gather",
        "answer = self._answers.get()",
    ),
]


class Job:
    """Ranks on hosts a, b, c, …, which make steps, and the looks at their stacks."""

    def __init__(self, ranks: int, seed: int = 1) -> None:
        self.ranks = Ranks([chr(ord("a") + rank) for rank in range(ranks)])
        self.watch = Watch(self.ranks, 100.0)
        self.now, self.step, self.looks = 100.0, 0, 0
        self.random = random.Random(seed)

    def after(
        self,
        seconds: int,
        at_work: Sequence[float],
        where: Frames = SLEEPS,
        *,
        own_s: float = 0.1,
        **facts: object,
    ) -> list[str]:
        """What is said meanwhile.

        Args:
            at_work: the share of each rank's time in which it is at `where`. Else it waits for the others.
            own_s: that a rank uses its core in a second, in which it makes ten steps; 0 for no steps.
        """
        said = []
        for _ in range(seconds):
            self.now += 1.0
            if own_s:
                self.step += 10
                for rank in range(self.ranks.world_size):
                    usage = progress(self.step, own_s=self.now * own_s)
                    self.ranks.note(Message(rank, "progress", usage, self.now))
            if not self.watch.wants_stacks(self.now, 0.0):
                continue
            self.looks += 1
            self.ranks.stacks.clear()
            for rank, share in enumerate(at_work):
                frames = where if self.random.random() < share else ALL_REDUCE
                sent = stacks(stack(frames), **facts)
                assert is_valid("stacks", sent)
                self.ranks.note(Message(rank, "stacks", sent, self.now))
            said += self.watch.judge_stacks(self.now)[0]
        return said


@pytest.mark.parametrize(
    ("where", "state", "what"),
    [
        (SLEEPS, "S", "hook (train.py:12): time.sleep(0.1)."),
        (OPENS, "D", "load (data.py:40): with open(path) as file. The likely cause is its disk."),
        (READS, "S", "main (train.py:9): torch.load(path)."),
        (LOADS, "S", "main (train.py:70): batch = next(batches). The likely cause is its data loader."),
    ],
)  # fmt: skip
def test_a_rank_that_uses_no_core_is_named_once_after_half_a_minute(
    where: Frames, state: str, what: str
) -> None:
    job = Job(4)
    assert job.after(28, [0.05, 1, 0, 0], where, state=state) == []
    (said,) = job.after(2000, [0.05, 1, 0, 0], where, state=state)
    assert said.startswith("rank 1 on b is a straggler: in ")
    assert said.endswith(f" of 30 looks, it is in {what}")
    assert job.watch.straggler.startswith("rank 1 on b is a straggler: ")
    assert job.looks < 300  # there are rests
    job.after(1, [0, 0, 0, 0], own_s=500.0)  # now the ranks compute
    assert job.watch.straggler == ""


@pytest.mark.parametrize(
    "at_work", [[0.25] * 4, [0.5, 0.5], [0.9] * 4, [0.2, 0, 0, 0], [0.5, 0.5, 0, 0]]
)
def test_100_000_steps_of_equal_ranks_name_nobody(at_work: list[float]) -> None:
    job = Job(len(at_work))
    assert job.after(10_000, at_work) == []
    assert job.looks > 1000


def test_ranks_that_wait_for_an_agreement_are_not_at_work() -> None:
    assert Job(4).after(100, [0, 0, 1, 0], AGREES) == []


def test_ranks_that_compute_are_not_looked_at() -> None:
    job = Job(4)
    job.after(100, [0, 1, 0, 0], own_s=60.0)
    assert job.looks == 0
