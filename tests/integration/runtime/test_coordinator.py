"""Ranks exchange values, refuse together and leave together. No rank hangs, and every error is printed.

Tests mpiddp/runtime/job/coordinator.py.
python -m pytest tests/integration/runtime/test_coordinator.py
"""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from mpiddp.errors import NoAnswer, UserError
from mpiddp.runtime.job.coordinator import Coordinator, Server
from tests.support.channels import member, serving
from tests.support.errors import error
from tests.support.patience import PATIENCE_S

SENTENCE = "hosts.txt:3: one sentence."

Body = Callable[[Coordinator], None]


@dataclass(frozen=True)
class End:
    """How a rank ended: its exit code and what it wrote on stderr."""

    code: int | None
    stderr: str


@pytest.fixture
def ranks(tmp_path: Path) -> Callable[..., list[End]]:
    """`ranks(n, body)` runs `body` in n processes that share a channel, and returns the end of each.

    The processes are forked, so torch is imported only once, and a test can repeat a race often.
    """

    def run(world_size: int, body: Body, *, absent: tuple[int, ...] = ()) -> list[End]:
        fork = multiprocessing.get_context("fork")
        present = [rank for rank in range(world_size) if rank not in absent]
        with serving(world_size) as server:
            processes = [
                fork.Process(target=_run_rank, args=(rank, world_size, server, tmp_path, body))
                for rank in present
            ]
            for process in processes:
                process.start()
            for process in processes:
                process.join(PATIENCE_S)
        hanging = [process for process in processes if process.is_alive()]
        for process in hanging:
            process.kill()
        assert not hanging
        ends = zip(processes, present, strict=True)
        return [End(each.exitcode, (tmp_path / f"{rank}").read_text()) for each, rank in ends]

    return run


def _run_rank(rank: int, world_size: int, server: Server, logs: Path, body: Body) -> None:
    os.dup2(os.open(logs / f"{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    body(member(server, rank, world_size))


# --- all_gather_json ---


def test_all_gather_json_returns_the_values_of_all_ranks(ranks):
    def body(coordinator: Coordinator) -> None:
        for turn in range(3):
            values = coordinator.all_gather_json((turn, coordinator.world.rank), timeout_s=60)
            assert values == [[turn, rank] for rank in range(4)]
        own = {"rank": coordinator.world.rank, "host": "café", "gpu": None}
        found = coordinator.all_gather_json(own, timeout_s=60)
        assert found[0] == {"rank": 0, "host": "café", "gpu": None}
        coordinator.leave()

    assert ranks(4, body) == [End(0, "")] * 4


def test_missing_ranks_are_named(ranks):
    def body(coordinator: Coordinator) -> None:
        if coordinator.world.world_size == 4:
            coordinator.hostnames = ("node0", "node0", "node1", "node1")
            time.sleep(0.1)
        try:
            coordinator.all_gather_json("", timeout_s=0.3)
        except NoAnswer as no_answer:
            print(no_answer, file=sys.stderr)

    silent = error("did not answer", "rank 2 on node1, rank 3 on node1 ", "0.3 s")
    both = ranks(4, body, absent=(2, 3))
    assert len(both) == 2
    assert all(re.fullmatch(f"{silent}\n", each.stderr) for each in both), both
    missing = error("did not answer", "rank 1 ", "0.3 s")
    first, *_ = ranks(2, body, absent=(1,))
    assert re.fullmatch(f"{missing}\n", first.stderr), first


# --- all_or_none ---


@pytest.mark.parametrize(
    ("refusing", "printed"),
    [([0, 1, 2], SENTENCE), ([0], f"rank 0: {SENTENCE}"), ([2], f"rank 2: {SENTENCE}")],
)
def test_rank_0_prints_a_refusal_once_and_all_ranks_exit(ranks, refusing, printed):
    def body(coordinator: Coordinator) -> None:
        with coordinator.all_or_none(timeout_s=60):
            if coordinator.world.rank in refusing:
                raise UserError(SENTENCE)

    for _ in range(5):  # repeated to catch a race
        assert ranks(3, body) == [End(2, f"{printed}\n"), End(2, ""), End(2, "")]


# --- leave ---


def test_rank_0_stays_until_all_have_left(ranks):
    """It serves torch's store."""

    def body(coordinator: Coordinator) -> None:
        if coordinator.world.rank > 0:
            time.sleep(0.5 * coordinator.world.rank)
            print("leaves", time.monotonic(), file=sys.stderr)
        coordinator.leave()
        print("has left", time.monotonic(), file=sys.stderr)

    first, *others = ranks(3, body)
    left = [float(each.stderr.splitlines()[0].split()[-1]) for each in others]
    assert float(first.stderr.split()[-1]) > max(left)
    assert {each.code for each in (first, *others)} == {0}
