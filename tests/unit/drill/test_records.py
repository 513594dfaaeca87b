"""What the ranks of a drill have recorded, read without a rank.

Tests mpiddp/drill/records.py.
python -m pytest tests/unit/drill/test_records.py
"""

from __future__ import annotations

import pytest

from mpiddp.drill.records import Attempt, History, Recording


@pytest.mark.parametrize(
    ("files", "saves"),
    [
        ([], []),
        ([7], [7]),
        ([1, 2, 3], [1, 2, 3]),
        ([5, 5, 10, 10], [5, 10]),
        # A thread has written the second file of some saves while the training went on.
        ([32, 33, 64, 64, 96, 98], [32, 64, 96]),
        ([10, 20, 25, 30], [10, 20, 25, 30]),
    ],
)
def test_the_steps_of_the_saves(files: list[int], saves: list[int]) -> None:
    attempt = Attempt(0, "node0", 0.0, None, [], [{"step": step} for step in files])
    assert Recording([History([attempt])]).saved_steps == saves
