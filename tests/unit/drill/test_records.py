"""What the ranks of a drill have recorded, read without a rank.

Tests mpiddp/drill/records.py.
python -m pytest tests/unit/drill/test_records.py
"""

from __future__ import annotations

import pytest

from mpiddp.drill.records import Attempt, History, Recording


def attempt(files: list[tuple[str, int]], steps: int = 0) -> Recording:
    saves = [{"path": path, "step": step} for path, step in files]
    states = [{"weights": str(step)} for step in range(steps)]
    return Recording([History([Attempt(0, "node0", 0.0, None, states, saves)])])


@pytest.mark.parametrize(
    ("files", "saves"),
    [
        ([], []),
        ([("", 7)], [7]),
        ([("1.pt", 1), ("2.pt", 2), ("3.pt", 3)], [1, 2, 3]),
        ([("10/a", 5), ("10/b", 5), ("20/a", 10), ("20/b", 10)], [5, 10]),
        ([("10/1", 5), ("10/2", 5), ("20/1", 10), ("20/2", 10)], [5, 10]),
        # A thread has written all but the first file while the training went on, also into the next save.
        ([("", 5), ("10/a", 6), ("10/b", 10), ("", 10), ("20/a", 11)], [5, 10]),
        ([("", 10), ("", 20), ("", 25), ("", 30)], [10, 20, 25, 30]),
        # Files that get their names once they are complete.
        ([("tmp8_ab1xyz", 5), ("tmpq0kz_lma", 10)], [5, 10]),
        ([("a.1b4e-77aa", 5), ("b.c0de-19fe", 5), ("a.aaee-beef", 10)], [5, 10]),
    ],
)
def test_the_steps_of_the_saves(files: list[tuple[str, int]], saves: list[int]) -> None:
    assert attempt(files).saved_steps == saves


@pytest.mark.parametrize(
    ("files", "saves"),
    [
        ([("", 5), ("10/a", 6)], []),
        ([("", 5), ("10/a", 6), ("10/b", 7), ("", 10)], [5]),
        ([("", 5), ("10/a", 6), ("10/b", 7), ("", 10), ("20/a", 10), ("20/b", 11)], [5, 10]),
    ],
)
def test_a_save_that_a_fault_has_broken_does_not_count(
    files: list[tuple[str, int]], saves: list[int]
) -> None:
    undisturbed = attempt([(path, step) for step in (5, 10) for path in ("", "a", "b")])
    assert attempt(files, steps=12).saved_before_fault(undisturbed) == saves


def test_a_rank_that_saves_into_memory_alone_says_nothing_of_the_files_of_another() -> None:
    def of_two_ranks(files: list[tuple[str, int]]) -> Recording:
        memory = attempt([("", step) for path, step in files if not path])
        return Recording([*attempt(files, steps=12).ranks, *memory.ranks])

    undisturbed = of_two_ranks([(path, step) for step in (5, 10) for path in ("", "a")])
    assert of_two_ranks([("", 5)]).saved_before_fault(undisturbed) == []
    assert of_two_ranks([("", 5), ("a", 6)]).saved_before_fault(undisturbed) == [5]
