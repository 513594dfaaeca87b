"""A run that was stopped and resumed ends with the same bits as one that was not stopped.

Tests mpiddp/train/checkpoint.py.
python -m pytest tests/ranks/checkpoints/test_resume.py
"""

import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mpiddp.checkpoints import folder as directory
from tests.support.data_cache import fetched_cifar10
from tests.support.errors import error
from tests.support.tiny_data import two_epochs
from tests.support.training import (
    Command,
    Ranks,
    Turn,
    contents,
    records,
    summary,
    unequal,
    waiting_ranks,
)

SAVE_ALL = ("--save-every=1", "--keep=99")


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    yield from waiting_ranks(4, tmp_path_factory.mktemp("pool"))


def step_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:08d}"


def steps_recorded(run: Path) -> list[int]:
    return [int(r["step"]) for r in records(run) if "train_loss" in r]


@pytest.mark.parametrize(
    ("ranks", "options", "steps"),
    [
        (1, ["--amp=off", "--use-syn", "--batch-size=4", "--steps-per-epoch=4"], 8),
        (2, ["--amp=bf16", "--batch-size=3", "--grad-accum-steps=2"], 4),
        (3, ["--optimizer=muon", "--batch-size=3", "--check-divergence=1"], 6),
        # DDP regroups gradients after the first step, and the order of three summands changes the sum.
        (3, ["--batch-size=4"], 4),
        (4, ["--amp=fp16", "--batch-size=3"], 4),
    ],
)
def test_a_resumed_run_has_the_same_weights_momentum_statistics_and_rng(
    tmp_path: Path, pool: Ranks, ranks: int, options: list[str], steps: int
) -> None:
    command = two_epochs(tmp_path, *options)
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    step = random.Random(f"{ranks} {options}").randrange(1, steps)
    start = step_folder(whole, step)
    ran = pool.run(
        ranks,
        tmp_path,
        [[*command, *SAVE_ALL, "--out", whole], [*command, "--out", resumed, f"--resume={start}"]],
    )
    assert [turn.code for turn in ran] == [0, 0], ran[0].stderr + ran[1].stderr
    assert f"resuming from {start}: step {step}\n" in ran[1].stdout
    assert unequal(contents(whole, steps), contents(resumed, steps)) == [], f"from step {step}"
    assert summary(resumed)["test_accuracy"] == summary(whole)["test_accuracy"]
    assert unequal(contents(whole, steps), contents(whole, step)) != []  # the test can fail


def test_a_run_prefers_its_own_checkpoints_to_those_of_another_run(
    tmp_path: Path, pool: Ranks
) -> None:
    """The same command resumes from the other run until this one has saved."""
    older, run = tmp_path / "older", tmp_path / "run"
    command = [*two_epochs(tmp_path, "--batch-size=4"), "--resume", older]
    ran = pool.run(
        2,
        tmp_path,
        [
            [*two_epochs(tmp_path, "--batch-size=4"), "--out", older, "--stop-at-step=2"],
            [*command, "--out", run, "--stop-at-step=4"],
            [*command, "--out", run],
            [*command, "--resume=auto", "--out", run],
        ],
    )
    assert [turn.code for turn in ran] == [75, 75, 0, 0], ran
    lines = [line for turn in ran for line in turn.stdout.splitlines()]
    assert [line for line in lines if line.startswith("resuming")] == [
        f"resuming from {step_folder(older, 2)}: step 2",
        f"resuming from {step_folder(run, 4)}: step 4",
        f"resuming from {step_folder(run, 6)}: step 6",
    ]
    assert lines.count(f"{older} is not used: {run} has checkpoints of its own") == 1


def test_a_finished_run_trains_more_epochs_with_other_options(tmp_path: Path, pool: Ranks) -> None:
    """The learning rate of each step is that of a run of four epochs from its start."""
    out, whole = tmp_path / "out", tmp_path / "whole"
    command = two_epochs(
        tmp_path,
        "--global-batch-size=8",
        "--log-every=1",
    )
    ran = pool.run(
        2,
        tmp_path,
        [
            [*command, "--out", out],
            [*command, "--out", out, "--epochs=4", "--lr=0.2"],
            [*command, "--out", whole, "--epochs=4", "--lr=0.2", "--stop-at-step=7"],
            [*command, "--out", out, "--epochs=4", "--seed=7"],
            [*command, "--out", out, "--epochs=1"],
        ],
    )
    assert [turn.code for turn in ran] == [0, 0, 75, 2, 0], [turn.stderr for turn in ran]
    assert (
        "resuming with other options: --epochs 2, now 4; --low-res-epochs 1, now 2; --lr 0.4, now 0.2."
        in ran[1].stdout
    )
    assert steps_recorded(out) == list(range(1, 13))
    rates = [{r["step"]: r["lr"] for r in records(run) if "lr" in r}[7] for run in (out, whole)]
    assert rates[0] == rates[1]
    sentence = error("same config", "--seed 0, now 7")
    assert re.search(sentence, ran[3].stderr), ran[3].stderr


def test_a_finished_run_goes_on_with_other_options(tmp_path: Path, pool: Ranks) -> None:
    """They hold from the next step on, also those that the optimizer's own state names."""
    run = tmp_path / "run"
    command = [*two_epochs(tmp_path, "--batch-size=4", "--amp=off"), "--out", run]
    changed = ["--epochs=3", "--lr=0.2", "--amp=fp16"]
    ran = pool.run(2, tmp_path, [command, [*command, *changed]])
    assert [turn.code for turn in ran] == [0, 0], ran
    assert (
        "resuming with other options: --epochs 2, now 3; --low-res-epochs 1, now 2; "
        "--lr 0.4, now 0.2; --amp off, now fp16. "
    ) in ran[1].stdout
    assert summary(run)["steps"] == 9
    saved = contents(run, 9)
    assert saved["scaler"]["scale"] > 0


@pytest.mark.slow
def test_resume_on_cifar10_across_the_end_of_an_epoch(tmp_path: Path, pool: Ranks) -> None:
    """An epoch has two steps, and ends with an evaluation of all 10,000 test images."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    command: Command = [
        f"--data-dir={fetched_cifar10()}", "--arch=resnet20", "--batch-size=8", "--epochs=2",
        "--steps-per-epoch=2", "--stop-at-step=3", "--low-res-epochs=0",
    ]  # fmt: skip
    ran = pool.run(
        2,
        tmp_path,
        [
            [*command, *SAVE_ALL, "--out", whole],
            [*command, "--out", resumed, f"--resume={step_folder(whole, 1)}"],
        ],
    )
    assert [turn.code for turn in ran] == [75, 75]
    assert unequal(contents(whole, 3), contents(resumed, 3)) == []
    assert records(whole)[-1] == records(resumed)[-1]  # the evaluation
    assert "test_accuracy" in records(whole)[-1]


# Ways to resume


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, pool: Ranks) -> tuple[Path, Command]:
    """A run of two ranks, stopped at step 2 of 6. An epoch has three steps."""
    folder = tmp_path_factory.mktemp("stopped")
    command = two_epochs(folder, "--global-batch-size=8", "--log-every=2")
    stop: Command = ["--out", folder / "out", "--stop-at-step=2", "--save-every=1"]
    (ran,) = pool.run(2, folder, [[*command, *stop]])
    assert (ran.code, ran.stderr) == (75, "")
    assert "stopped at step 2. To resume, run the same command." in ran.stdout
    return folder / "out", command


@pytest.fixture(scope="module")
def resumed(
    stopped: tuple[Path, Command], tmp_path_factory: pytest.TempPathFactory, pool: Ranks
) -> dict[str, tuple[Path, Turn]]:
    """Copies of that run, changed in several ways, and resumed by two ranks."""
    folder = tmp_path_factory.mktemp("resumed")
    start, command = stopped
    outs = {
        name: Path(shutil.copytree(start, folder / name))
        for name in ("unchanged", "flipped bit", "killed", "again", "back")
    }
    model = step_folder(outs["flipped bit"], 2) / "model.pt"
    content = bytearray(model.read_bytes())
    content[len(content) // 2] ^= 1
    model.write_bytes(content)
    with (outs["killed"] / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "epoch": 0, "train_loss": 99}\n{"step": 4, "ep')
    outs["moved"] = folder / "moved"
    outs["never"] = folder / "never"
    options: dict[str, Command] = {
        "again": ["--stop-at-step=2"],
        "back": [f"--resume={step_folder(outs['back'], 1)}"],
        "moved": [f"--resume={start}"],
        "never": ["--resume=never"],
    }
    names = [*outs, "again"]
    commands = [[*command, "--out", outs[name], *options.get(name, [])] for name in names]
    ran = pool.run(2, folder, commands)
    assert [turn.code for turn in ran] == [0] * len(names), [turn.stderr for turn in ran]
    return {name: (outs[name], turn) for name, turn in zip(names, ran, strict=True)}


def test_every_resumed_run_ends_with_the_same_bits(resumed: dict[str, tuple[Path, Turn]]) -> None:
    expected = contents(resumed["never"][0], 6)
    for name, (out, _) in resumed.items():
        assert unequal(contents(out, 6), expected) == [], name


def test_the_output_names_the_resumed_checkpoint(resumed: dict[str, tuple[Path, Turn]]) -> None:
    out, ran = resumed["unchanged"]
    assert f"resuming from {step_folder(out, 2)}: step 2\n" in ran.stdout
    assert "resuming" not in resumed["never"][1].stdout
    _, ran = resumed["flipped bit"]
    assert (
        "checkpoint step_00000002: model.pt does not match its SHA-256; "
        "resuming from step_00000001 (1 steps lost)."
    ) in ran.stdout


def test_records_after_the_checkpoint_are_dropped(resumed: dict[str, tuple[Path, Turn]]) -> None:
    for name, expected in (
        ("never", [2, 3, 4, 6]),
        ("unchanged", [2, 3, 4, 6]),
        ("killed", [2, 3, 4, 6]),
        ("moved", [3, 4, 6]),
    ):
        out, _ = resumed[name]
        assert steps_recorded(out) == expected, name
        assert all(r.get("train_loss", 0) < 99 for r in records(out))


def test_resuming_from_an_older_checkpoint_renames_the_newer_ones(
    resumed: dict[str, tuple[Path, Turn]],
) -> None:
    """Otherwise they would count as checkpoints of this run."""
    out, ran = resumed["back"]
    assert "renamed to step_00000002.old-1: its step is later" in ran.stdout
    directory.verify(out / "checkpoints" / "step_00000002.old-1")
    assert "renamed to" not in resumed["unchanged"][1].stdout


def test_resuming_a_finished_run_keeps_its_summary(resumed: dict[str, tuple[Path, Turn]]) -> None:
    """The fixture has the second turn of "again", which resumes the finished run."""
    out, ran = resumed["again"]
    assert "resuming from" in ran.stdout
    assert "step_00000006: step 6\n" in ran.stdout
    assert summary(out)["images_per_s"] > 0
    assert summary(out)["train_loss"] == summary(resumed["unchanged"][0])["train_loss"]


def test_another_number_of_ranks_resumes_with_the_same_global_batch(
    stopped: tuple[Path, Command], tmp_path: Path, pool: Ranks
) -> None:
    start, command = stopped
    out = tmp_path / "out"
    shutil.copytree(start, out)
    (ran,) = pool.run(1, tmp_path, [[*command, "--out", out, *SAVE_ALL]])
    assert "step_00000002: step 2\n" in ran.stdout
    found = summary(out)
    assert (found["world_size"], found["steps"], found["global_batch_size"]) == (1, 6, 8)
    assert steps_recorded(out) == [2, 3, 4, 6]
    before, after = (contents(out, step)["model"]["bn1.running_var"] for step in (2, 3))
    assert (before - 1).abs().max() > 0.1
    torch.testing.assert_close(after, before, rtol=0.2, atol=0.02)  # from the averaged statistics
