"""A curve of a million values keeps its extremes in few points.

Tests mpiddp/report/curves.py.
python -m pytest tests/unit/report/test_curves.py
"""

from __future__ import annotations

import pytest

from mpiddp.report.curves import Curve, thinned


def curve(values: list[float]) -> Curve:
    found = Curve()
    for step, value in enumerate(values):
        found.add(step, value)
    return found


def test_a_short_curve_stays_as_it_is() -> None:
    steps, values = thinned(curve([3.0, 1.0, 2.0]), 10)
    assert (list(steps), list(values)) == ([0, 1, 2], [3.0, 1.0, 2.0])


@pytest.mark.parametrize("parts", [1, 7, 100])
def test_a_long_curve_keeps_the_extremes_of_each_part(parts: int) -> None:
    values = [float(each * 7919 % 1009) for each in range(100_000)]
    values[54_321], values[77_777] = 1e9, -1e9
    steps, kept = thinned(curve(values), parts)
    assert len(steps) <= 2 * parts
    assert list(steps) == sorted(set(steps))
    assert (max(kept), min(kept)) == (1e9, -1e9)
    assert all(values[int(step)] == value for step, value in zip(steps, kept, strict=True))


def test_steps_that_come_again_replace_what_they_repeat() -> None:
    found = curve([1.0, 2.0, 3.0, 4.0])
    found.add(2, 9.0)
    assert (list(found.steps), list(found.values)) == ([0, 1, 2], [1.0, 2.0, 9.0])
