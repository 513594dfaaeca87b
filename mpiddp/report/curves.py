"""Curves as they look, in few points: the smallest and the largest value of each part of the steps.

A mean would hide the one loss that explodes among a thousand; both extremes keep it.
"""

from __future__ import annotations

from array import array


class Curve:
    """The values of one name by step, in steps that increase.

    A step that comes again replaces what it repeats: its records were written before a restart.
    nan_since: the first of the last steps whose value is no number.
    """

    def __init__(self) -> None:
        self.steps, self.values = array("d"), array("d")
        self.nan_since: int | None = None

    def add(self, step: float, value: float | None) -> None:
        """Add a value; None for one that is no number."""
        if value is None:
            self.nan_since = int(step) if self.nan_since is None else self.nan_since
            return
        self.nan_since = None
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            self.values.pop()
        self.steps.append(step)
        self.values.append(value)


def thinned(curve: Curve, parts: int) -> tuple[array[float], array[float]]:
    """At most 2 * `parts` points of the curve, in order: the extremes of each part."""
    steps, values = curve.steps, curve.values
    if len(steps) <= 2 * parts:
        return steps, values
    kept: dict[int, None] = {}
    for part in range(parts):
        begin, end = part * len(steps) // parts, (part + 1) * len(steps) // parts
        within = values[begin:end]
        extremes = {begin + within.index(min(within)), begin + within.index(max(within))}
        kept |= dict.fromkeys(sorted(extremes))
    return array("d", [steps[i] for i in kept]), array("d", [values[i] for i in kept])
