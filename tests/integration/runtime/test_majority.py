"""The majority of the ranks is right, and the sentence about the others is short.

Tests mpiddp/runtime/torch/divergence.py.
python -m pytest tests/integration/runtime/test_majority.py
"""

from __future__ import annotations

import pytest
import torch

import mpiddp
from mpiddp.runtime.torch.divergence import bare_names, differing_ranks
from tests.support.errors import error


@pytest.mark.parametrize(
    ("digests", "expected"),
    [
        ([[1, 2], [1, 3]], "a and b differ, first in w (1 of 2 tensors)"),
        ([[1, 2], [4, 3]], "a and b differ, first in v (2 of 2 tensors)"),
        (
            [[1, 2], [1, 3], [1, 2]],
            "b differs from the 2 ranks that agree, first in w (1 of 2 tensors)",
        ),
        ([[1, 2], [1, 3], [1, 4]], "a, b and c differ, first in w (1 of 2 tensors)"),
        ([[1, 2], [5, 2], [5, 2], [1, 2]], "a = d and b = c differ, first in v (1 of 2 tensors)"),
        (
            [[1, 2], [1, 2], [1, 2], [4, 2], [1, 7]],
            "d differs from the 3 ranks that agree, first in v (1 of 2 tensors), "
            "e differs from the 3 ranks that agree, first in w (1 of 2 tensors)",
        ),
    ],
)
def test_the_majority_is_right(digests: list[list[int]], expected: str) -> None:
    by_name = [dict(zip("vw", row, strict=True)) for row in digests]
    assert differing_ranks("abcde"[: len(digests)], by_name) == expected


def test_ranks_that_hold_different_tensors() -> None:
    found = differing_ranks("abc", [{"v": 1, "w": 2}, {"w": 2, "v": 1}, {"v": 1}])
    assert found.startswith("a and c hold different tensors, such as w.")


def test_a_sentence_about_many_ranks_is_short() -> None:
    ranks = [f"rank {rank} on a-host-with-a-long-name-{rank}" for rank in range(256)]
    all_differ = differing_ranks(ranks, [{"v": rank} for rank in range(256)])
    many_odd = differing_ranks(ranks, [{"v": max(0, rank - 200)} for rank in range(256)])
    assert len(all_differ) < 250
    assert len(many_odd) < 550
    assert many_odd.startswith("rank 201 on ")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["module.0.weight", "module.fc"], ["0.weight", "fc"]),  # DDP
        (["_orig_mod.module.fc"], ["fc"]),  # a compiled DDP
        (["module.0._orig_mod.weight", "module.fc"], ["0.weight", "fc"]),  # a compiled child
        (["weight", "module.weight"], ["weight", "module.weight"]),
        (["weight", "_orig_mod.weight"], ["weight", "_orig_mod.weight"]),
        ([], []),
    ],
)
def test_names_lose_what_ddp_and_compile_add_if_they_still_differ(
    names: list[str], expected: list[str]
) -> None:
    assert bare_names(names) == expected


def test_a_process_without_other_ranks_has_nothing_to_compare() -> None:
    mpiddp.check_divergence(torch.nn.Linear(2, 2))


def test_ranks_without_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    values = ("mpiddp.check_divergence ", "torch.distributed.init_process_group", "mpiddp.init")
    with pytest.raises(mpiddp.UserError, match=error("mpiddp.check_divergence needs", *values)):
        mpiddp.check_divergence(torch.nn.Linear(2, 2))
