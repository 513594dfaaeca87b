"""Training with real ranks: gradients, evaluation, options, and the files of a run.

Tests mpiddp/train/.
python -m pytest tests/ranks/train/test_training.py
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mpiddp.train.resnet import ARCHS
from tests.support import tiny_data
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT, clean_env, mpirun, script
from tests.support.training import (
    Command,
    Ranks,
    Turn,
    configured,
    contents,
    records,
    summary,
    train,
    waiting_ranks,
)

QUICK = ["--arch=resnet20", "--batch-size=4", "--use-syn", "--steps-per-epoch=3", "--epochs=2"]


# Exactness


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    yield from waiting_ranks(4, tmp_path_factory.mktemp("pool"))


@pytest.fixture(scope="module")
def exactness(tmp_path_factory: pytest.TempPathFactory, pool: Ranks) -> dict[int, dict[str, Any]]:
    """The results of tests/jobs/exactness.py on 1, 2, 3 and 4 ranks."""
    found = {}
    for ranks in (1, 2, 3, 4):
        file = tmp_path_factory.mktemp("exactness") / "found.json"
        (ran,) = pool.run(ranks, file.parent, [["-m", "tests.jobs.exactness", file]])
        assert (ran.code, ran.stderr) == (0, "")
        found[ranks] = json.loads(file.read_text())
    return found


def test_gradients_equal_those_of_one_process_for_any_split_of_the_batch(
    exactness: dict[int, dict[str, Any]],
) -> None:
    """1×24, 2×12, 3×8 and 4×6 images, in one or two backward passes, also with uneven shares and tails."""
    for ranks, found in exactness.items():
        assert len(found["errors"]) == 13
        for case, (gradient_error, loss_error) in found["errors"].items():
            assert gradient_error < 5e-6, (ranks, case)
            assert loss_error < 5e-6, (ranks, case)


def test_accumulated_gradients_are_reduced_once(exactness: dict[int, dict[str, Any]]) -> None:
    assert {found["reductions_of_a_step"] for found in exactness.values()} == {1}


def test_evaluation_is_exact_with_any_number_of_ranks(exactness: dict[int, dict[str, Any]]) -> None:
    for ranks, found in exactness.items():
        for num_images, score in zip((37, 3), found["scores"], strict=True):
            assert score["requested"] == list(range(num_images)), ranks  # each once
            assert score["num_images"] == num_images
            assert score["right"] == score["reference_right"]
            assert score["loss"] == pytest.approx(score["reference_loss"], rel=1e-5)
    assert len({found["scores"][0]["right"] for found in exactness.values()}) == 1


def test_the_random_state_of_every_rank_is_restored(exactness: dict[int, dict[str, Any]]) -> None:
    assert all(found["draws_after_restoring"] for found in exactness.values())


# A run and its folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 ranks on a tiny Fashion-MNIST, with 5 steps in each of 2 epochs and 37 test images."""
    folder = tmp_path_factory.mktemp("run")
    data = tiny_data.image_folder(folder / "data", 45, 37)
    job = train(
        4, "--dataset=fashion-mnist", f"--data-dir={data}", "--arch=resnet20", "--epochs=2",
        "--global-batch-size=8", "--log-every=2", "--out", folder / "out",
    )  # fmt: skip
    assert job.returncode == 0, job.stderr
    (folder / "stdout").write_text(job.stdout)
    return folder / "out"


def test_a_run_writes_its_files(run: Path) -> None:
    assert sorted(path.name for path in run.iterdir()) == [
        "checkpoints", "config.json", "logs", "metrics.jsonl", "starts", "summary.json",
    ]  # fmt: skip
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "step_00000005", "step_00000010",
    ]  # fmt: skip


def test_the_summary(run: Path) -> None:
    found = summary(run)
    expected = {
        "dataset": "data",
        "arch": "resnet20",
        "world_size": 4,
        "num_nodes": 1,
        "global_batch_size": 8,
        "epochs": 2,
        "steps": 10,
        "test_images": 12,
    }
    assert {name: found[name] for name in expected} == expected
    assert sum(found["hosts"].values()) == 4
    assert found["num_parameters"] == sum(
        p.numel() for p in ARCHS["resnet20"](num_classes=3, stem="cifar").parameters()
    )
    assert (found["test_accuracy"] * 12) % 1 == pytest.approx(0, abs=1e-9)
    assert 1 < found["train_loss"] < 5
    assert 0 < found["step_time_p50_s"] <= found["step_time_p95_s"] < found["wall_s"]
    # The first 3 of 10 steps of 8 images do not count.
    assert 0 < 7 * 8 / found["images_per_s"] < found["wall_s"]
    assert list(found["phases"]) == [
        "data", "forward", "backward", "waiting", "optimizer", "evaluation", "save",
    ]  # fmt: skip
    assert all(seconds > 0 for seconds in found["phases"].values())
    # They are means over the ranks, of which some wait for the others before rank 0 begins.
    assert sum(found["phases"].values()) < 2 * found["wall_s"]


def test_a_rank_that_loads_its_data_slowly_makes_the_other_wait(tmp_path: Path) -> None:
    code = (
        "import sys, time; from mpiddp.train import opening; from mpiddp.world import World\n"
        "prefetched = opening.prefetched\n"
        "def slowly(batches, device):\n"
        "    for batch in prefetched(batches, device):\n"
        "        time.sleep(0.2 * World.from_env().rank)\n"
        "        yield batch\n"
        "opening.prefetched = slowly\n"
        "from mpiddp.train.main import main; sys.exit(main(sys.argv[1:]))\n"
    )
    done = mpirun(
        2, script(tmp_path, code), *("--use-syn", "--arch", "resnet20", "--batch-size", "4"),
        *("--steps-per-epoch", "10", "--epochs", "1", "--out", f"{tmp_path}/run"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    phases = summary(tmp_path / "run")["phases"]
    # Means of both ranks: one sleeps for 2 s, the other waits for about as long.
    assert phases["data"] >= 1
    assert 2 * phases["waiting"] > phases["data"]


def test_the_records(run: Path) -> None:
    found = records(run)
    steps = [(r["step"], r["epoch"]) for r in found if "train_loss" in r]
    assert steps == [(2, 0), (4, 0), (5, 0), (6, 1), (8, 1), (10, 1)]
    assert set(found[0]) == {"step", "epoch", "lr", "train_loss", "images_per_s", "step_time_s"}
    tests = [r for r in found if "test_accuracy" in r]
    assert [(r["step"], r["epoch"]) for r in tests] == [(10, 1)]  # epoch 0 has smaller images
    assert tests[-1]["test_accuracy"] == summary(run)["test_accuracy"]
    assert found[-2]["train_loss"] == summary(run)["train_loss"]
    # In 2.5 of 10 steps the rate warms up to 0.4 · 8 / 256, then it falls linearly.
    assert [r["lr"] for r in found if "lr" in r][:2] == pytest.approx([0.0125, 0.0125 * 7 / 8])


def test_the_configuration(run: Path) -> None:
    config = json.loads((run / "config.json").read_text())
    assert set(config) == set(configured().as_json())
    assert (config["batch_size"], config["global_batch_size"]) == (2, 8)
    assert config["amp"] in ("bf16", "off")  # resolved, no longer "auto"
    assert config["epochs"] == 2


def test_every_rank_has_a_log(run: Path) -> None:
    logs = sorted((run / "logs").iterdir())
    assert [log.name for log in logs] == [f"rank_{rank:05d}.log" for rank in range(4)]
    for rank, log in enumerate(logs):
        started, done = log.read_text().splitlines()
        assert f"started: rank {rank} of 4, local rank {rank}, node 0" in started
        assert done.endswith(" done")


def test_the_checkpoint_has_one_model_and_the_state_of_every_rank(run: Path) -> None:
    saved = contents(run, 10)
    assert len(saved["ranks"]) == 4
    assert set(saved["model"]) == set(ARCHS["resnet20"]().state_dict())
    mean = saved["model"]["bn1.running_mean"]
    means = [rank["state"]["buffers"][: len(mean)] for rank in saved["ranks"]]
    assert not torch.equal(means[0], means[1])
    torch.testing.assert_close(mean, torch.stack(means).mean(0))
    assert not torch.equal(saved["ranks"][0]["rng"]["torch"], saved["ranks"][1]["rng"]["torch"])
    folder = run / "checkpoints" / "step_00000010"
    assert json.loads((folder / "state.json").read_text())["step"] == 10
    training = torch.load(folder / "training.pt")
    assert (training["epoch"], training["position"]) == (2, 0)
    assert training["options"] == json.loads((run / "config.json").read_text())


def test_the_output_of_rank_0(run: Path) -> None:
    printed = run.with_name("stdout").read_text()
    assert "4 ranks on 1 host over gloo, resnet20 on fashion-mnist" in printed
    assert "peak lr 0.0125 (--lr 0.4 scaled by batch/256)" in printed
    assert printed.count("epoch 1/2  step 2/10  loss ") == 1  # only rank 0 prints
    table = printed.rpartition("\n\n")[2].splitlines()
    assert [line.partition("  ")[0] for line in table] == [
        "data set", "arch", "ranks", "steps", "images/s", "step time", "time",
        "train loss", "test accuracy", "wall time", "run folder",
    ]  # fmt: skip
    assert table[8].endswith("% of 37 images")
    assert table[10].endswith(str(run))


# Options


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory, pool: Ranks) -> dict[str, Turn]:
    """Short runs of 2 ranks with different options, by the path of their folder."""
    folder = tmp_path_factory.mktemp("options")
    weights = folder / "weights.pt"
    torch.save({**ARCHS["resnet20"]().state_dict(), "bn1.bias": torch.full((16,), 7.0)}, weights)
    images = tiny_data.image_folder(folder / "images", 6, 3)
    commands: dict[str, Command] = {
        "plain": [*QUICK, "--amp=off"],
        "again": [*QUICK, "--amp=off"],
        "seed": [*QUICK, "--amp=off", "--seed=1", "--stop-at-step=6"],  # the last step
        "bf16": [*QUICK, "--amp=bf16"],
        "fp16": [*QUICK, "--amp=fp16"],
        "contiguous": [*QUICK, "--amp=off"],
        "accumulated": [*QUICK, "--amp=off", "--grad-accum-steps=2", "--batch-size=2"],
        "unscaled": [*QUICK, "--no-lr-scaling", "--lr=0.05", "--schedule=constant"],
        "weights": [*QUICK, f"--weights={weights}", "--no-lr-scaling", "--lr=1e-9"],
        "images": [
            "--dataset=image-folder", f"--data-dir={images}", "--image-size=32", "--num-workers=1",
            "--arch=resnet18", "--batch-size=4", "--epochs=1", 
        ],
    }  # fmt: skip
    ran = pool.run(
        2, folder, [[*command, "--out", folder / name] for name, command in commands.items()]
    )
    assert [turn.code for turn in ran] == [0] * len(commands), [turn.stderr for turn in ran]
    return {str(folder / name): turn for name, turn in zip(commands, ran, strict=True)}


def folder_of(options: dict[str, Turn], name: str) -> Path:
    return next(Path(path) for path in options if Path(path).name == name)


def losses(options: dict[str, Turn], name: str) -> list[float]:
    return [r["train_loss"] for r in records(folder_of(options, name)) if "train_loss" in r]


SLOWEST = """
import sys, torch, mpiddp
from mpiddp.train.measure import slowest
with mpiddp.process_group() as world:
    own = [[0.25, 4.0], [2.0, 0.5]][world.rank]
    print(slowest(own, torch.device("cpu")))
"""


def test_slowest_is_the_maximum_over_the_ranks() -> None:
    done = mpirun(2, "-c", SLOWEST)
    assert done.stdout.splitlines() == ["[2.0, 4.0]"] * 2, done.stderr


# 13 convolutions for three ranks, then two, and none.
SHARED = """
import torch, mpiddp
from mpiddp.train.step import build_optimizer
from tests.support.training import configured

def stepped(sizes):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Conv2d(4, size, 3) for size in sizes))
    optimizer = build_optimizer(model, configured("--arch=wide_resnet14_2"))
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return list(model.parameters())

cases = [range(3, 17), [2, 8, 5], [2]]
alone = [stepped(sizes) for sizes in cases]
with mpiddp.process_group():
    for sizes, expected in zip(cases, alone):
        for one, other in zip(stepped(sizes), expected, strict=True):
            assert torch.equal(one, other), sizes
"""


def test_ranks_that_share_the_work_of_muon_have_the_weights_of_one() -> None:
    done = mpirun(3, "-c", SHARED)
    assert done.returncode == 0, done.stderr


def test_losses_depend_only_on_the_seed(options: dict[str, Turn]) -> None:
    assert losses(options, "plain") == losses(options, "again")
    assert losses(options, "plain") != losses(options, "seed")


@pytest.mark.parametrize("name", ["bf16", "contiguous"])
def test_precision_and_layout_change_little(options: dict[str, Turn], name: str) -> None:
    assert losses(options, name) == pytest.approx(losses(options, "plain"), rel=0.05)
    assert losses(options, name) != losses(options, "plain")


def test_fp16_skips_steps_that_overflow(options: dict[str, Turn]) -> None:
    """The first steps overflow: the scale begins at 65536, and each overflow halves it."""
    saved = contents(folder_of(options, "fp16"), 6)
    assert saved["scaler"]["scale"] < 65536
    first, last = losses(options, "fp16")
    assert first == pytest.approx(losses(options, "plain")[0], rel=0.05)
    assert last < 4
    for state in saved["optimizer"]["state"].values():
        assert state["momentum_buffer"].abs().max() < 100


def test_no_lr_scaling_uses_the_given_lr(options: dict[str, Turn]) -> None:
    rates = [r["lr"] for r in records(folder_of(options, "unscaled"))]
    assert rates == pytest.approx([0.05, 0.05])


def test_training_starts_from_the_given_weights(options: dict[str, Turn]) -> None:
    model = contents(folder_of(options, "weights"), 6)["model"]
    torch.testing.assert_close(model["bn1.bias"], torch.full((16,), 7.0))


def test_synthetic_data_has_no_test_set(options: dict[str, Turn]) -> None:
    found = summary(folder_of(options, "plain"))
    assert found["dataset"] == "synthetic cifar10"
    assert found["test_accuracy"] is None
    assert options[str(folder_of(options, "plain"))].stdout.count("no test set") == 1


def test_an_image_folder(options: dict[str, Turn]) -> None:
    found = summary(folder_of(options, "images"))
    assert (found["dataset"], found["steps"], found["test_images"]) == ("images", 3, 9)


# A single rank


def test_a_deterministic_training_without_a_launcher(tmp_path: Path) -> None:
    program = (
        "import os, sys, torch; from mpiddp.cli import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        "assert torch.are_deterministic_algorithms_enabled()\n"
        "assert os.environ['CUBLAS_WORKSPACE_CONFIG'] == ':4096:8'\n"
    )
    command = [sys.executable, "-c", program, "train", *QUICK, "--deterministic"]
    job = subprocess.run(
        [*command, f"--out={tmp_path}"],
        env=clean_env(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (job.returncode, job.stderr) == (0, "")
    assert "no launcher: training alone, as rank 0 of 1." in job.stdout
    assert summary(tmp_path)["world_size"] == 1


def test_a_compiled_model_trains_and_saves_under_the_same_names() -> None:
    """The model is small, because a ResNet takes a minute to compile on two cores."""
    program = (
        "import torch\n"
        "from mpiddp.runtime.start.join import join\n"
        "from mpiddp.runtime.torch.process_group import default_group\n"
        "from tests.support.training import configured\n"
        "from mpiddp.train.step import backward\n"
        "from mpiddp.train.parallel import wrap\n"
        "from mpiddp.train.order import Step\n"
        "torch.manual_seed(0)\n"
        "model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 10))\n"
        "batch = torch.randn(4, 3, 4, 4), torch.arange(4)\n"
        "numbers = torch.arange(4)\n"
        "scaler = torch.amp.GradScaler('cpu', enabled=False)\n"
        "with join() as coordinator, default_group(coordinator, 'gloo', torch.device('cpu'), timeout_s=60):\n"
        "    gradients = []\n"
        "    for mode in ('off', 'default'):\n"
        "        config = configured('--amp=off', *(['--compile'] if mode == 'default' else []))\n"
        "        ddp = wrap(model, config, (3, 4, 4), [])\n"
        "        for step in (Step((numbers,), 4), Step((numbers, numbers), 8)):\n"
        "            backward(ddp, iter([batch] * 2), step, scaler, config)\n"
        "            gradients.append(model[1].weight.grad.clone())\n"
        "            model.zero_grad()\n"
        "    torch.testing.assert_close(gradients[:2], gradients[2:])\n"
        "    assert list(model.state_dict()) == ['1.weight', '1.bias']\n"
    )
    job = mpirun(1, "-c", program)
    assert job.returncode == 0, job.stderr
