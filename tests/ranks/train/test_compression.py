"""Training with compressed gradients still learns, and all ranks have the same weights.

Tests mpiddp/train/parallel.py.
python -m pytest tests/ranks/train/test_compression.py
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from mpiddp.train.options import COMPRESSIONS
from tests.support.ranks import mpirun


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of tests/jobs/compressed.py on 2 ranks, by kind of compression."""
    file = tmp_path_factory.mktemp("compressed") / "found.json"
    job = mpirun(2, "-m", "tests.jobs.compressed", str(file))
    assert job.returncode == 0, job.stderr
    by_kind: dict[str, Any] = json.loads(file.read_text())
    return by_kind


@pytest.mark.parametrize("kind", COMPRESSIONS)
def test_compressed_training_learns_the_same_on_all_ranks(found: dict[str, Any], kind: str) -> None:
    assert found[kind]["ranks_agree"]
    losses = found[kind]["losses"]
    assert losses[-1] < 0.5 * losses[0]
    assert losses[-1] < 1.1 * found["off"]["losses"][-1]


@pytest.mark.parametrize(("kind", "bits"), [("bf16", 8), ("fp16", 11)])
def test_the_error_of_a_compressed_gradient_is_its_rounding(
    found: dict[str, Any], kind: str, bits: int
) -> None:
    """Each rank's gradient is rounded once, and the sum once more: half a unit of the last bit each."""
    exact = torch.tensor(found["off"]["first_gradient"])
    rounded = torch.tensor(found[kind]["first_gradient"])
    assert not torch.equal(rounded, exact)
    largest = exact.abs().max().item()
    assert (rounded - exact).abs().max().item() < 4 * largest * 2**-bits


def test_powersgd_begins_after_its_warm_up(found: dict[str, Any]) -> None:
    plain, powersgd = found["off"]["losses"], found["powersgd"]["losses"]
    pairs = zip(plain, powersgd, strict=True)
    first_difference = next(step for step, (one, other) in enumerate(pairs) if one != other)
    assert first_difference > 90
