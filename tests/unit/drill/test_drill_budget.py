"""The time that each command of a drill gets.

Tests mpiddp/drill/main.py.
python -m pytest tests/unit/drill/test_drill_budget.py
"""

from __future__ import annotations

import pytest

from mpiddp.drill.main import _limit_s


@pytest.mark.parametrize(
    ("left_s", "faults", "undisturbed_s", "limit_s"),
    [
        (3600, 12, 10, 110),  # a command that hangs leaves most of its share to others
        (3600, 12, 120, 300),  # a share
        (600, 12, 120, 270),  # more than a share, as less would be of no use
        (200, 12, 120, 200),
    ],
)
def test_the_time_of_a_command(
    left_s: float, faults: int, undisturbed_s: float, limit_s: float
) -> None:
    assert _limit_s(left_s, faults, undisturbed_s) == limit_s
