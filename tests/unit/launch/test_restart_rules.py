"""The rules of a restart: its options, its batch, its folder, and the requests to stop it.

Tests mpiddp/launch/job.py.
python -m pytest tests/unit/launch/test_restart_rules.py
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

import mpiddp
from mpiddp.runtime.launcher.announcement import Announced, announced
from mpiddp.train.config import _keep_global_batch
from mpiddp.train.options import parse


@pytest.mark.parametrize(
    ("options", "ranks_before"),
    [
        (["--batch-size", "4", "--seed", "1"], 3),
        (["--batch_size=4", "--seed", "1"], 3),
        (["--global-batch-size", "12", "--seed", "1"], 3),
        (["--seed", "1", "--grad-accum-steps", "3", "--batch-size", "1"], 4),
        (["--seed", "1", "--grad-accum-steps", "3", "--global-batch-size=12"], 1),
    ],
)
@pytest.mark.parametrize(("ranks", "passes"), [(1, 3), (2, 2), (3, 1), (4, 1)])
def test_a_restart_keeps_the_global_batch(
    options: list[str], ranks_before: int, ranks: int, passes: int
) -> None:
    """A pass has at most 4 images, as before. In the case with 1 image, it gets 2 where possible."""
    written = parse(options)
    before = Announced(global_batch_size=12, world_size=ranks_before)
    kept = Namespace(**vars(written))
    _keep_global_batch(kept, before, ranks)
    if ranks == ranks_before:
        assert kept == written
        return
    if written.batch_size == 1:
        passes = max(1, 6 // ranks)  # two images per pass, which BatchNorm needs
    assert (kept.batch_size, kept.global_batch_size, kept.grad_accum_steps) == (None, 12, passes)
    assert kept.seed == 1


def test_no_pass_of_a_restart_has_a_single_image() -> None:
    """BatchNorm needs two, so a pass may have more images than before."""
    for images, before, ranks in ((8, 8, 3), (10, 5, 4)):
        kept = parse([])
        _keep_global_batch(kept, Announced(images, before), ranks)
        assert kept.grad_accum_steps == 1


def test_announcing_without_a_launcher_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPIDDP_ANNOUNCED", raising=False)
    mpiddp.announce(resume_args=["--resume"], global_batch_size=4, max_ranks=2)
    assert announced() is None


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ({"resume_args": "--resume"}, TypeError, "resume_args: expected a sequence of strings"),
        ({"resume_args": [1]}, TypeError, "resume_args: expected a sequence of strings"),
        ({"global_batch_size": 2.0}, TypeError, "global_batch_size: expected a whole number"),
        ({"global_batch_size": True}, TypeError, "global_batch_size: expected a whole number"),
        ({"resume_args": ["a\0b"]}, ValueError, "resume_args: not the arguments of a command"),
        ({"resume_args": ["\ud800"]}, ValueError, "resume_args: not the arguments of a command"),
        ({"max_ranks": 0}, ValueError, "max_ranks: expected 1 or more, not 0"),
        ({"max_ranks": 1 << 63}, ValueError, "max_ranks: expected at most 9223372036854775807"),
    ],
)
def test_an_invalid_announcement(
    arguments: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        mpiddp.announce(**arguments)
