"""`mpiddp train --parallel fsdp|hsdp`: the losses of DDP, exact resume, tails, clipping, less memory.

Tests mpiddp/train/fully_sharded.py.
python -m pytest tests/ranks/train/test_sharded_training.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import tiny_data
from tests.support.ranks import mpirun
from tests.support.training import Command, Ranks, Turn, records, summary, waiting_ranks

# The same convolutions for all: fully_shard takes contiguous parameters only.
MODEL: Command = [
    "--arch=resnet20",
    "--amp=off",
    "--epochs=1",
    "--log-every=1",
]
STEPS_50: Command = [*MODEL, "--use-syn", "--batch-size=4", "--steps-per-epoch=50"]
TOLERANCE = 1e-5  # relative


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    yield from waiting_ranks(4, tmp_path_factory.mktemp("pool"))


def losses(run: Path) -> list[float]:
    return [record["train_loss"] for record in records(run) if "train_loss" in record]


def run_all(pool: Ranks, ranks: int, folder: Path, commands: dict[str, Command]) -> dict[str, Turn]:
    """Run the commands, each with a folder of its own in `folder`. Each has to succeed."""
    turns = pool.run(
        ranks, folder, [[*command, "--out", folder / name] for name, command in commands.items()]
    )
    assert [turn.code for turn in turns] == [0] * len(turns), [turn.stderr for turn in turns]
    return dict(zip(commands, turns, strict=True))


@pytest.mark.parametrize(("ranks", "lr"), [(2, "0.1"), (4, "0.001")])
def test_the_losses_of_50_steps_are_those_of_ddp(
    tmp_path: Path, pool: Ranks, ranks: int, lr: str
) -> None:
    """Four ranks round their sums in another order. A larger learning rate magnifies that in every step."""
    commands: dict[str, Command] = {
        parallel: [*STEPS_50, f"--lr={lr}", f"--parallel={parallel}"]
        for parallel in ("ddp", "fsdp")
    }
    run_all(pool, ranks, tmp_path, commands)
    ddp, fsdp = (losses(tmp_path / name) for name in commands)
    assert len(ddp) == 50
    assert fsdp == pytest.approx(ddp, rel=TOLERANCE)
    assert ddp[0] != pytest.approx(ddp[-1], rel=0.01)  # it has trained

    assert [summary(tmp_path / name)["parallel"] for name in commands] == ["ddp", "fsdp"]


@pytest.mark.parametrize(
    ("ranks", "parallel", "share"), [(2, "ddp", 1), (2, "fsdp", 1 / 2), (4, "fsdp", 1 / 4)]
)
def test_each_rank_holds_its_share_of_the_state(
    tmp_path: Path, ranks: int, parallel: str, share: float
) -> None:
    done = mpirun(
        ranks, "-m", "tests.jobs.counted_bytes", str(tmp_path), *map(str, STEPS_50),
        "--steps-per-epoch=1", f"--parallel={parallel}", "--out", str(tmp_path / "run"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    state = 3 * 4 * summary(tmp_path / "run")["num_parameters"]  # with gradients, momentum; fp32
    found = [(tmp_path / f"bytes_{rank}").read_text().split() for rank in range(ranks)]
    assert {int(one_copy) for _, one_copy in found} == {state}
    assert share * state <= max(int(own) for own, _ in found) < 1.1 * share * state


def test_tails_accumulation_clipping_and_evaluation_are_those_of_ddp(
    tmp_path: Path, pool: Ranks
) -> None:
    """In the tail of 7 images, the ranks have 4, 3, 0 and 0 of 4 passes; one rank has no test image."""
    data = tiny_data.image_folder(tmp_path / "data", 39, 3)
    common: Command = [
        *MODEL, "--dataset=fashion-mnist", f"--data-dir={data}", "--batch-size=1", "--stem=cifar",
        "--grad-accum-steps=4", "--epochs=2", "--lr=0.1", "--low-res-epochs=0",
    ]  # fmt: skip
    commands: dict[str, Command] = {
        "ddp": common,
        "fsdp": [*common, "--parallel=fsdp"],
        "clipped ddp": [*common, "--clip-grad-norm=0.5"],
        "clipped fsdp": [*common, "--parallel=fsdp", "--clip-grad-norm=0.5"],
    }
    run_all(pool, 4, tmp_path, commands)
    found = {name: losses(tmp_path / name) for name in commands}
    assert len(found["ddp"]) == 2 * 3
    for kind in ("", "clipped "):
        assert found[f"{kind}fsdp"] == pytest.approx(found[f"{kind}ddp"], rel=1e-4)
        ours, theirs = (summary(tmp_path / f"{kind}{parallel}") for parallel in ("fsdp", "ddp"))
        assert ours["test_accuracy"] == theirs["test_accuracy"]
    assert found["clipped ddp"] != pytest.approx(found["ddp"], rel=1e-3)  # clipping had an effect


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_mixed_precision_trains_like_fp32(tmp_path: Path, pool: Ranks, amp: str) -> None:
    """With fp16, the gradient scaler starts too high, and skips the step in which a gradient overflows.

    From there on, the training is a step behind that in fp32: the learning rate is small enough that this
    does not change the losses much. DDP skips the same step.
    """
    common: Command = [*STEPS_50, "--steps-per-epoch=10", "--lr=0.01"]
    commands: dict[str, Command] = {
        "fp32": [*common, "--parallel=fsdp"],
        amp: [*common, "--parallel=fsdp", f"--amp={amp}"],
        f"ddp {amp}": [*common, f"--amp={amp}"],
    }
    run_all(pool, 2, tmp_path, commands)
    fp32, mixed, ddp = (losses(tmp_path / name) for name in commands)
    assert mixed != fp32
    assert mixed == pytest.approx(fp32, rel=0.03)
    assert mixed == pytest.approx(ddp, rel=1e-3)
