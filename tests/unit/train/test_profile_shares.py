"""The share of communication that is hidden behind computation, from the intervals of both.

Tests mpiddp/train/profiling.py.
python -m pytest tests/unit/train/test_profile_shares.py
"""

from __future__ import annotations

import pytest

from mpiddp.errors import UserError
from mpiddp.train.options import parse
from mpiddp.train.profiling import length, overlap, union
from tests.support.errors import error


def test_times_that_overlap_count_once() -> None:
    assert union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert length(union([(0, 2), (1, 3), (1.5, 2)])) == 3
    assert union([]) == []


def test_the_times_in_both() -> None:
    communication, computation = [(0.0, 4.0), (6.0, 8.0), (9.0, 10.0)], [(1.0, 2.0), (3.0, 7.0)]
    assert overlap(communication, computation) == [(1, 2), (3, 4), (6, 7)]
    assert overlap(computation, communication) == [(1, 2), (3, 4), (6, 7)]
    assert overlap(communication, []) == []


def test_the_options() -> None:
    options = parse(["--profile", "10:15", "--profile-ranks", "0,03"])
    assert (options.profile, options.profile_ranks) == ("10:15", "0,3")


@pytest.mark.parametrize("text", ["10", "15:10", "0:5", "1:2:3", "a:b", "1:", "", "-1:5"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=error("--help", " --profile: ", "10:15", repr(text))):
        parse([f"--profile={text}"])


@pytest.mark.parametrize("text", ["", "0,", "none", "1-3", "-1"])
def test_other_ranks_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=error("--help", " --profile-ranks: ", "0,5", repr(text))):
        parse(["--profile=1:2", f"--profile-ranks={text}"])
