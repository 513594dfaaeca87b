"""The first difference of two runs, and the options of the check.

Tests mpiddp/train/determinism.py.
python -m pytest tests/integration/train/test_first_difference.py
"""

from __future__ import annotations

import pytest

from mpiddp.errors import UserError
from mpiddp.train.determinism import first_difference
from mpiddp.train.options import parse
from tests.support.errors import error

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


def test_the_options_of_the_check() -> None:
    assert parse([]).check_determinism is None
    assert parse(["--check-determinism"]).check_determinism == 10
    assert parse(["--check_determinism=3", "--resume=never"]).check_determinism == 3
    with pytest.raises(UserError, match="--check-determinism and --resume PATH"):
        parse(["--check-determinism", "--resume", "runs/a"])
    for option in ("--check-determinism=0", "--check-divergence=0", "--check-divergence"):
        name = option.partition("=")[0]
        with pytest.raises(UserError, match=error("--help", f"argument {name}: ")):
            parse([option])
