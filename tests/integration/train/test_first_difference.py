"""The first difference of two runs, and the options of the check.

Tests mpiddp/train/determinism.py.
python -m pytest tests/integration/train/test_first_difference.py
"""

from __future__ import annotations

from mpiddp.train.determinism import first_difference

LOSS, GRADIENT = "the loss", "the gradient of a"


def test_the_first_difference_is_the_first_in_time() -> None:
    equal = {GRADIENT: 1, LOSS: 2}
    assert first_difference([equal, equal], [equal, dict(equal)]) is None
    both = first_difference([equal, equal, equal], [equal, {GRADIENT: 3, LOSS: 4}, {GRADIENT: 5}])
    assert both == (2, 0, GRADIENT, 2)
    assert first_difference([equal], [{GRADIENT: 1, LOSS: 9}]) == (1, 1, LOSS, 1)


def test_a_tensor_that_only_one_run_has_is_a_difference() -> None:
    """As after an overflow of fp16 in one of them."""
    assert first_difference([{LOSS: 1}], [{LOSS: 1, GRADIENT: 2}]) == (1, 1, GRADIENT, 1)
