"""Curves as they look, in few points: the smallest and the largest value of each pixel's steps.

A mean would hide the one loss that explodes among a thousand; both extremes keep it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence


class Curve:
    """The values of one name by step, in steps that increase.

    A step that comes again replaces what it repeats: its records were written before a restart.
    """

    def __init__(self) -> None:
        self.steps, self.values = array("d"), array("d")

    def add(self, step: float, value: float) -> None:
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            self.values.pop()
        self.steps.append(step)
        self.values.append(value)


def thinned(curve: Curve, pixels: int) -> tuple[array[float], array[float]]:
    """At most 2 * `pixels` + 2 points of the curve: its ends, and the extremes of each pixel, in order."""
    steps, values = curve.steps, curve.values
    if len(steps) <= 2 * pixels:
        return steps, values
    width = (steps[-1] - steps[0]) / pixels
    kept = [0]
    begin = 0
    for pixel in range(pixels):
        end = bisect_left(steps, steps[0] + (pixel + 1) * width, begin)
        if pixel == pixels - 1:  # the sum may be rounded below the last step
            end = len(steps)
        if begin < end:
            within = values[begin:end]
            extremes = {begin + within.index(min(within)), begin + within.index(max(within))}
            kept += sorted(extremes)
        begin = end
    kept += [len(steps) - 1]
    indices = dict.fromkeys(kept)  # without the repetitions at the ends
    return array("d", [steps[i] for i in indices]), array("d", [values[i] for i in indices])


def some_of(values: Sequence[float], most: int) -> list[float]:
    """At most `most` of the values, evenly spread, the last among them."""
    if len(values) <= most:
        return list(values)
    return [values[(index + 1) * len(values) // most - 1] for index in range(most)]
