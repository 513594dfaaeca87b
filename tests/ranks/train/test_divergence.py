"""Ranks that no longer hold the same bits are found and named, and their state is not saved.

Tests mpiddp/runtime/torch/divergence.py.
python -m pytest tests/ranks/train/test_divergence.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpiddp.checkpoints import folder as directory
from tests.support.errors import error
from tests.support.ranks import launch, script
from tests.support.training import Command, Ranks, contents, train, unequal, waiting_ranks

ARCH = ["--use-syn", "--arch=resnet20", "--batch-size=2", "--amp=off", "--epochs=1"]
TENSORS = 118  # of resnet20: 59 parameters, each with its momentum


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    yield from waiting_ranks(3, tmp_path_factory.mktemp("pool"))


# The sentence


# The names


# The check


@pytest.fixture(scope="module", params=[2, 3])
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, pool: Ranks
) -> tuple[int, dict[str, str]]:
    """The number of ranks, and the results of tests/jobs/diverging.py on them, without hosts' names."""
    file = tmp_path_factory.mktemp("diverging") / "found.json"
    (ran,) = pool.run(request.param, file.parent, [["-m", "tests.jobs.diverging", file]])
    assert (ran.code, ran.stderr) == (0, "")
    texts = {
        name: re.sub(r"(rank \d) on \S+", r"\1", text)
        for name, text in json.loads(file.read_text()).items()
    }
    return request.param, texts


def differ(ranks: int, odd: int, where: str) -> str:
    if ranks == 2:
        return f"the ranks have diverged: rank 0 and rank 1 differ, first in {where}."
    return f"the ranks have diverged: rank {odd} differs from the 2 ranks that agree, first in {where}."


def test_equal_ranks_have_not_diverged(found: tuple[int, dict[str, str]]) -> None:
    """Each rank has statistics of BatchNorm, or shards, of its own."""
    _, texts = found
    assert texts["nothing"] == texts["buffer"] == texts["sharded"] == texts["group"] == ""


def test_one_flipped_bit_names_the_rank_and_the_tensor(found: tuple[int, dict[str, str]]) -> None:
    """24 tensors: 6 parameters, each with two moments and a count of steps."""
    ranks, texts = found
    last, step = ranks - 1, "step 200: "
    assert texts["parameter"] == step + differ(ranks, last, "3.weight (1 of 24 tensors)")
    assert texts["state"] == step + differ(ranks, 0, "exp_avg_sq of 0.bias (1 of 24 tensors)")
    assert texts["both"] == step + differ(ranks, last, "3.weight (2 of 24 tensors)")
    public = error("", differ(ranks, 1, "3.weight (1 of 6 tensors)"))
    assert re.fullmatch(public, texts["public"])


def test_copies_of_a_shard_are_compared_within_their_group(
    found: tuple[int, dict[str, str]],
) -> None:
    ranks, texts = found
    expected = differ(ranks, ranks - 1, "weight (1 of 1 tensors)")
    assert texts["copies of shards"] == f"step 200: {expected}"
    refused = error("mpiddp.check_divergence: each", "mpiddp.check_divergence: ", "group=")
    assert re.fullmatch(refused, texts["only shards"])


def test_parameters_whose_names_differ_in_what_ddp_adds_stay_apart(
    found: tuple[int, dict[str, str]],
) -> None:
    ranks, texts = found
    expected = differ(ranks, ranks - 1, "weight (1 of 3 tensors)")
    assert texts["child named module"] == f"step 200: {expected}"


def test_ranks_with_other_tensors_are_named(found: tuple[int, dict[str, str]]) -> None:
    ranks, texts = found
    # Without a majority, rank 0 counts as the usual.
    assert texts["lost"] == (
        f"step 200: the ranks have diverged: rank {ranks - 1} lacks exp_avg of 3.bias torch.float32 "
        "[5], unlike other ranks. If the optimizer's state is sharded, check the model alone."
    )


DIVERGES = """
import sys
from pathlib import Path
import torch, mpiddp
world = mpiddp.init(backend="gloo")
checkpoints = mpiddp.Checkpoints(sys.argv[1])
checkpoints.save(1, {"weights": torch.zeros(10_000_000)})  # rank 0 writes
model = torch.nn.Linear(1, 1)
torch.nn.init.constant_(model.weight, world.rank)
try:
    mpiddp.check_divergence(model)
except mpiddp.JobFailed:
    is_saved = Path(sys.argv[1], "checkpoints/step_00000001").is_dir()
    sys.stdout.write(f"{world.rank} {is_saved}\\n")
    sys.stdout.flush()
    raise
"""


def test_a_script_that_has_diverged_completes_its_save(tmp_path: Path) -> None:
    done = launch("-H", "localhost:2", script(tmp_path, DIVERGES), str(tmp_path / "run"))
    assert done.returncode == 1, done.stderr
    assert re.search(error("", ": rank 0 on "), done.stderr), done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 True", "1 True"]
    directory.verify(tmp_path / "run/checkpoints/step_00000001")


# mpiddp train


def steps(run: Path) -> list[int]:
    return [directory.step_of(folder) for folder in directory.list_steps(run / "checkpoints")]


@pytest.mark.parametrize(
    ("ranks", "what", "odd", "step", "expected"),
    [
        (
            3, "parameter", 2, 4,
            f"rank 2 differs from the 2 ranks that agree, first in fc.weight (1 of {TENSORS} tensors)"),
        # The next steps carry the momentum into the parameter.
        (3, "momentum", 1, 3, "rank 1 differs from the 2 ranks that agree, first in fc.weight "
                              f"(2 of {TENSORS} tensors)"),
        (2, "momentum", 1, 4, "rank 0 and rank 1 differ, first in momentum_buffer of fc.weight "
                              f"(1 of {TENSORS} tensors)"),
    ],
)  # fmt: skip
def test_a_diverged_training_ends_and_is_not_saved(
    tmp_path: Path, pool: Ranks, ranks: int, what: str, odd: int, step: int, expected: str
) -> None:
    out = tmp_path / "out"
    options: Command = [
        *ARCH, "--steps-per-epoch=6", "--save-every=2", "--keep=9", "--check-divergence=4",
        "--out", out,
    ]  # fmt: skip
    job = ["-m", "tests.jobs.flipped_bit", what, str(odd), str(step)]
    (ran,) = pool.run(ranks, tmp_path, [[*job, *options]])
    assert ran.code == 1
    found = re.sub(r"(rank \d) on \S+", r"\1", ran.stderr)
    sentence = error("This state", f"step 4: the ranks have diverged: {expected}. ")
    assert re.fullmatch(f"{sentence}\n", found), found
    assert steps(out) == [2]


def test_every_save_is_checked_before(tmp_path: Path, pool: Ranks) -> None:
    """The interval of the check is longer than the run."""
    out = tmp_path / "out"
    options: Command = [
        *ARCH, "--steps-per-epoch=6", "--save-every=2", "--keep=9", "--check-divergence=1000",
        "--out", out,
    ]  # fmt: skip
    job = ["-m", "tests.jobs.flipped_bit", "parameter", "1", "4"]
    (ran,) = pool.run(2, tmp_path, [[*job, *options]])
    assert ran.code == 1
    assert re.match(error("This state", "step 4: "), ran.stderr), ran.stderr
    assert steps(out) == [2]


def test_the_check_changes_no_bit(tmp_path: Path, pool: Ranks) -> None:
    command = [*ARCH, "--steps-per-epoch=4"]
    checked, plain = tmp_path / "checked", tmp_path / "plain"
    ran = pool.run(
        3,
        tmp_path,
        [[*command, "--check-divergence=1", "--out", checked], [*command, "--out", plain]],
    )
    assert [turn.code for turn in ran] == [0, 0], ran
    assert unequal(contents(checked, 4), contents(plain, 4)) == []


def test_a_restart_resumes_from_equal_ranks(tmp_path: Path) -> None:
    """The bit is flipped once. The job ends with the bits of a job without a fault."""
    faulty, sound = tmp_path / "faulty", tmp_path / "sound"
    command = [*ARCH, "--steps-per-epoch=6", "--save-every=2", "--check-divergence=3"]
    job = ["-m", "tests.jobs.flipped_bit", "momentum", "1", "3"]
    where = ["-H", "localhost:2", "--max-restarts", "1"]
    done = launch(*where, *job, *command, "--out", str(faulty))
    assert done.returncode == 0, done.stderr
    sentence = error("This state", "step 3: ", ": rank 0 on ")
    assert re.search(sentence, done.stderr), done.stderr
    assert "resuming from" in done.stdout
    assert train(2, *command, "--out", sound).returncode == 0
    assert unequal(contents(faulty, 6), contents(sound, 6)) == []
