"""`mpiddp train --check-determinism`: two runs from the same start have the same bits, or the cause is named.

Tests mpiddp/train/determinism.py.
python -m pytest tests/ranks/train/test_determinism.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import tiny_data
from tests.support.errors import error
from tests.support.ranks import mpiddp
from tests.support.training import Command, Ranks, waiting_ranks

SYNTHETIC = ["--use-syn", "--arch=resnet20", "--batch-size=2", "--amp=off", "--epochs=2"]
# resnet20 has 59 parameters, each with a gradient and a momentum, and 19 BatchNorms with 3 buffers each.
TENSORS = 3 * 59 + 3 * 19 + len(("images", "labels", "loss"))


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    yield from waiting_ranks(3, tmp_path_factory.mktemp("pool"))


def fashion(folder: Path, *options: str) -> Command:
    """A command for two epochs of three steps with augmentation, and a tail of two images."""
    return tiny_data.two_epochs(folder, "--global-batch-size=8", *options)


@pytest.mark.parametrize(
    ("ranks", "options", "steps", "tensors"),
    [
        (2, ["--check-determinism=2"], 2, TENSORS + 2),
        # The default number of steps is more than two epochs of four steps.
        (1, ["--check-determinism", "--amp=bf16"], 8, TENSORS + 2),
        (2, ["--check-determinism=5", "--amp=fp16"], 5, TENSORS + 2),
        (2, ["--check-determinism=3", "--amp=bf16", "--parallel=fsdp"], 3, TENSORS + 2),
    ],
)
def test_two_runs_are_equal(
    tmp_path: Path, pool: Ranks, ranks: int, options: list[str], steps: int, tensors: int
) -> None:
    """Each step has two backward passes, so the images and labels of two."""
    out = tmp_path / "out"
    command = fashion(tmp_path, "--grad-accum-steps=2", *options)
    (ran,) = pool.run(ranks, tmp_path, [[*command, "--out", out]])
    assert (ran.code, ran.stderr) == (0, "")
    ranks_text = "1 rank" if ranks == 1 else f"{ranks} ranks"
    assert ran.stdout == (
        f"two runs of {steps} steps from the same start are equal bit for bit on {ranks_text}, in each "
        f"of {tensors} tensors of a step.\n"
    )
    assert not out.exists()


def test_one_process_without_a_launcher(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = mpiddp(
        "train", *SYNTHETIC, "--steps-per-epoch=1", "--check-determinism", "--out", str(out)
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == (
        "two runs of 2 steps from the same start are equal bit for bit on 1 rank, in each of "
        f"{TENSORS} tensors of a step."
    )
    assert not out.exists()


@pytest.mark.parametrize(
    ("what", "rank", "step", "first"),
    [
        ("images", 1, 3, "the images"),
        ("buffer", 0, 1, "the buffer bn1.running_mean"),
        ("loss", 2, 2, "the loss"),
        ("gradient", 1, 1, "the gradient of conv1.weight"),
        ("parameter", 2, 3, "the parameter fc.bias"),
        ("shard", 1, 2, "the gradient of conv1.weight"),
    ],
)
def test_the_first_difference_names_its_cause(
    tmp_path: Path, pool: Ranks, what: str, rank: int, step: int, first: str
) -> None:
    job = ["-m", "tests.jobs.unseeded", what, str(rank), str(step), *SYNTHETIC]
    parallel = "fsdp" if what == "shard" else "ddp"
    options = ["--check-determinism=4", f"--parallel={parallel}", "--out", tmp_path / "out"]
    (ran,) = pool.run(3, tmp_path, [[*job, *options]])
    assert (ran.code, ran.stdout) == (1, "")
    counts = f" of {TENSORS} tensors "
    values = (" 4 steps ", f" step {step}, ", f" rank {rank} on ", f" {first} (", counts)
    assert re.fullmatch(error("differ: first", *values) + "\n", ran.stderr), ran.stderr
    found = re.search(rf"\((\d+){counts}.*?\)\.(.*) \[", ran.stderr)
    assert found, ran.stderr
    num_different, hint = int(found[1]), found[2]
    if what == "images":
        assert hint == " The data source gives other values for the same numbers of images."
    else:
        assert hint == ""  # --deterministic changes little on a CPU
    if what == "parameter":
        assert num_different == 1
    assert not (tmp_path / "out").exists()


# The comparison


# Options
