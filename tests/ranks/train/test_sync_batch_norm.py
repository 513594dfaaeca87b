"""--sync-bn: several ranks train as one process does with the whole batch.

Tests mpiddp/train/sync_batch_norm.py.
python -m pytest tests/ranks/train/test_sync_batch_norm.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import tiny_data
from tests.support.training import Ranks, contents, records, waiting_ranks

# The ranks add up in another order than one process. Each of the three steps multiplies the error, since the
# gradients of 19 layers of BatchNorm depend on it: in fp32 the weights then still agree to this.
TOLERANCE = 2e-4
TRAINING = (
    *("--dataset=fashion-mnist", "--arch=resnet20", "--global-batch-size=32", "--epochs=1"),
    *("--steps-per-epoch=3", "--lr=0.05", "--amp=off", "--log-every=1"),
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    yield from waiting_ranks(4, tmp_path_factory.mktemp("ranks"))


def with_data(folder: Path) -> list[str | Path]:
    """The options of the training, with images that depend on their number, unlike synthetic ones."""
    if not (folder / "data").exists():
        tiny_data.image_folder(folder / "data", 100, 10)
    return [*TRAINING, f"--data-dir={folder / 'data'}"]


def trained(ranks: Ranks, folder: Path, count: int, *options: str) -> Path:
    run = folder / "-".join([str(count), *options])
    (turn,) = ranks.run(count, folder, [[*with_data(folder), *options, f"--out={run}"]])
    assert turn.code == 0, turn.stderr
    return run


def largest_difference(one: Path, other: Path) -> float:
    """Of all weights and BatchNorm statistics after the last step."""
    states = [contents(run, 3)["model"] for run in (one, other)]
    return max((states[0][name] - each).abs().max().item() for name, each in states[1].items())


def test_two_and_four_ranks_equal_one_process(ranks: Ranks, tmp_path: Path) -> None:
    one = trained(ranks, tmp_path, 1)
    for count in (2, 4):
        synced = trained(ranks, tmp_path, count, "--sync-bn")
        assert largest_difference(synced, one) < TOLERANCE
        for own, expected in zip(losses(synced), losses(one), strict=True):
            assert own == pytest.approx(expected, rel=TOLERANCE)
        # The test could not fail if BatchNorm made no difference.
        assert largest_difference(trained(ranks, tmp_path, count), one) > 20 * TOLERANCE


def losses(run: Path) -> list[float]:
    return [record["train_loss"] for record in records(run) if "train_loss" in record]


def test_a_run_resumes_with_the_same_bits(ranks: Ranks, tmp_path: Path) -> None:
    whole = trained(ranks, tmp_path, 2, "--sync-bn")
    run = tmp_path / "resumed"
    training = [*with_data(tmp_path), "--sync-bn", f"--out={run}"]
    stopped, resumed = ranks.run(2, tmp_path, [[*training, "--stop-at-step=2"], training])
    assert (stopped.code, resumed.code) == (75, 0), resumed.stderr
    assert largest_difference(run, whole) == 0
