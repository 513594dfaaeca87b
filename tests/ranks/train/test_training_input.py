"""Bad input of `mpiddp train` on two real ranks: one sentence, exit code 2, and no output folder.

Tests mpiddp/train/.
python -m pytest tests/ranks/train/test_training_input.py
"""

import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mpiddp.checkpoints import directory
from mpiddp.checkpoints.run_dir import save_json
from mpiddp.train.data import cifar10_files
from mpiddp.train.resnet import ARCHS
from tests.support import tiny_data
from tests.support.errors import error
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT, clean_env, mpirun, own_lines
from tests.support.training import Command, Ranks, Turn, records, summary, train, waiting_ranks

QUICK: Command = ["--arch=resnet20", "--batch-size=4", "--use-syn", "--steps-per-epoch=2"]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    yield from waiting_ranks(2, tmp_path_factory.mktemp("pool"))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, pool: Ranks) -> Path:
    """A finished run in `done`, and folders with bad input."""
    inputs = tmp_path_factory.mktemp("input")
    (ran,) = pool.run(
        2, inputs, [[*QUICK, "--epochs=1", "--save-every=1", "--out", inputs / "done"]]
    )
    assert ran.code == 0
    (inputs / "file").write_text("in the way")

    broken = inputs / "broken" / "checkpoints"
    shutil.copytree(inputs / "done" / "checkpoints", broken)
    for folder in broken.iterdir():
        (folder / "model.pt").write_bytes(b"cut")

    def fill_foreign(folder: Path) -> None:
        (folder / "state.json").write_text('{"epoch": 3}')

    def fill_strange(folder: Path) -> None:
        shutil.copy(inputs / "done/checkpoints/step_00000002/state.json", folder)
        for name in ("model", "optimizer", "scaler", "training", "ranks"):
            (folder / f"{name}.pt").write_bytes(b"\xff\xd8")

    def fill_crafted(folder: Path) -> None:
        shutil.copy(inputs / "done/checkpoints/step_00000002/state.json", folder)
        for name in ("model", "optimizer", "scaler", "training", "ranks"):
            torch.save([1], folder / f"{name}.pt")

    directory.write(inputs / "crafted", 2, fill_crafted)
    directory.write(inputs / "foreign", 2, fill_foreign)
    directory.write(inputs / "strange", 2, fill_strange)
    directory.write(inputs / "other", 2, lambda folder: (folder / "a").touch())

    cifar = inputs / "cifar" / "cifar-10-batches-bin"
    cifar.mkdir(parents=True)
    for name in cifar10_files.BIN:
        (cifar / name).write_bytes(bytes(1000))
    fashion = tiny_data.fashion_mnist(inputs / "fashion", 20, 10)
    labels = fashion / "train-labels-idx1-ubyte.gz"
    labels.write_bytes(labels.read_bytes()[:30])
    shutil.rmtree(tiny_data.image_folder(inputs / "images", 4, 2) / "val")

    weights = ARCHS["resnet20"]().state_dict()
    torch.save({name: weights[name] for name in list(weights)[:3]}, inputs / "part.pt")
    (inputs / "blocked").mkdir()
    (inputs / "blocked" / "checkpoints").write_text("a file in the way")
    return inputs


# name: options (P is the folder above), and the sentence
CASES: dict[str, tuple[str, str]] = {
    "arch": (
        "--arch=resnet19",
        error("--help", "mpiddp train: ", "--arch: ", "'resnet19' ", "mpiddp train --help"),
    ),
    "misspelled option": (
        "--use-sin",
        error("--help", "mpiddp train: ", "--use-sin. ", '"--use-syn"', "mpiddp train --help"),
    ),
    "batch": (
        "--global-batch-size=7",
        error("not divisible", "--global-batch-size 7 ", "2 ranks", "6 or 8, or --uneven"),
    ),
    "large batch": (
        "--batch-size=99999999 --use-syn",
        error("the global", "199999998 images", "(50000 images)", "--batch-size"),
    ),
    "nccl": (
        "--backend=nccl",
        error("Use --backend", "--backend nccl ", "--backend gloo"),
    ),
    "image size": (
        "--image-size=64",
        error("--image-size applies", "--image-size ", "cifar10 ", " 32 "),
    ),
    "no weights": (
        "--use-syn --weights=P/w.pt",
        error("--weights", "--weights P/w.pt: No such file or directory ("),
    ),
    "part of weights": (
        "--use-syn --arch=resnet20 --weights=P/part.pt",
        error("missing. Check", "--weights P/part.pt: bn1.running_mean ", "--arch"),
    ),
    "other arch's weights": (
        "--use-syn --arch=resnet18 --weights=P/done/checkpoints/step_00000002/model.pt",
        error("not part", "--weights P/", "model.pt: layer1.2.conv1.weight ", "--arch"),
    ),
    "powersgd in fp16": (
        "--use-syn --amp=fp16 --grad-compression=powersgd",
        error("powersgd and", "--grad-compression powersgd ", "--amp fp16 ", "--amp bf16"),
    ),
    "single image": (
        "--use-syn --arch=resnet18 --stem=imagenet --batch-size=1",
        error("BatchNorm cannot", "32×32", "--batch-size 2"),
    ),
    "warm-up": (
        "--use-syn --epochs=1 --warmup-epochs=2",
        error("--warmup-epochs", "--warmup-epochs 2 ", "--epochs 1"),
    ),
    "no fashion-mnist": (
        "--dataset=fashion-mnist --data-dir=P/done",
        error("copy the", "Fashion-MNIST ", "P/done, P/done/fashion-mnist; "),
    ),
    "no data folder": (
        "--data-dir=P/none",
        error("--data-dir", "rank 0 on ", ": --data-dir P/none is missing (", "Create it"),
    ),
    "cut cifar10": (
        "--data-dir=P/cifar",
        error(
            "not CIFAR-10's",
            *("P/cifar/cifar-10-batches-bin/data_batch_1.bin ", " 541b3e9d", " cee91656"),
            "remove P/cifar/cifar-10-batches-bin and run again",
        ),
    ),
    "cut fashion-mnist": (
        "--dataset=fashion-mnist --data-dir=P/fashion",
        error("a readable", "P/fashion/train-labels-idx1-ubyte.gz: "),
    ),
    "no image folder": (
        "--dataset=image-folder",
        error("--dataset", "--dataset image-folder ", "--data-dir DIR"),
    ),
    "half an image folder": (
        "--dataset=image-folder --data-dir=P/images",
        error("jpg, val/CLASS/", "P/images/val ", "train/CLASS/*.jpg"),
    ),
    "file in the way": (
        "--use-syn --out=P/file/out",
        error("Name another folder", "P/file/out ", "Not a directory"),
    ),
    "checkpoints in the way": (
        "--use-syn --steps-per-epoch=2 --batch-size=4 --out=P/blocked",
        error("Name another folder", "P/blocked ", "File exists"),
    ),
    "out too long": (
        f"--use-syn --out=P/{'x' * 300}",
        error(":", f"P/{'x' * 300}/metrics.jsonl: File name too long"),
    ),
    "resume too long": (
        f"--use-syn --resume=P/{'x' * 300}",
        error(":", "rank 0 on ", f": P/{'x' * 300}: File name too long"),
    ),
    "data folder too long": (
        f"--data-dir=P/{'x' * 300}",
        error(":", "rank 0 on ", f": --data-dir P/{'x' * 300}: File name too long"),
    ),
    "resume crafted": (
        "QUICK --epochs=1 --resume=P/crafted",
        error("files have", "P/crafted/step_00000002 "),
    ),
    "resume nothing": (
        "--use-syn --resume=atuo",
        error("not found", "rank 0 on ", ": atuo "),
    ),
    "resume a file": (
        "--use-syn --resume=P/file",
        error("contains no checkpoint", "rank 0 on ", ": P/file: "),
    ),
    "resume broken": (
        "--use-syn --resume=P/broken",
        error("no verified", "rank 0 on ", ": P/broken: "),
    ),
    "resume one broken": (
        "--use-syn --resume=P/broken/checkpoints/step_00000002",
        error(":", "rank 0 on ", ": checkpoint step_00000002: model.pt has 3 bytes "),
    ),
    "continue broken": (
        "--use-syn --out=P/broken",
        error("checkpoint. Name", "rank 0 on ", ": P/broken/checkpoints "),
    ),
    "resume another program's": (
        "--use-syn --resume=P/other/step_00000002",
        error("it has no", "P/other/step_00000002 ", "state.json"),
    ),
    "resume foreign": (
        "--use-syn --resume=P/foreign",
        error("files have", "P/foreign/step_00000002 "),
    ),
    "resume strange": (
        "QUICK --epochs=1 --resume=P/strange",
        error("written by", "P/strange/step_00000002/model.pt "),
    ),
    "other configuration": (
        "QUICK --epochs=1 --lr=0.2 --arch=resnet32 --out=P/done",
        error(
            *("same options", "step 2 "),
            *(": --arch resnet20, now resnet32 (its tensors have other shapes). ", "--weights "),
        ),
    ),
    "resume other configuration": (
        "QUICK --epochs=1 --seed=1 --resume=P/done",
        error("same options", "step 2 ", ": --seed 0, now 1 (", "--weights "),
    ),
    "resume never": (
        "QUICK --epochs=1 --resume=never --out=P/done",
        error("--resume never", "--resume never, ", "--out P/done ", "(checkpoints)"),
    ),
}


@pytest.fixture(scope="module")
def refused(
    inputs: Path, tmp_path_factory: pytest.TempPathFactory, pool: Ranks
) -> dict[str, tuple[Turn, Path]]:
    """Every case on the same two ranks, one after another, and its output folder."""
    outs = tmp_path_factory.mktemp("outs")
    commands: list[Command] = []
    for name, (options, _) in CASES.items():
        command: Command = ["--out", outs / name]  # a later --out takes precedence
        for option in options.split():
            command += QUICK if option == "QUICK" else [option.replace("P/", f"{inputs}/")]
        commands.append(command)
    ran = pool.run(2, inputs, commands)
    return {name: (turn, outs / name) for name, turn in zip(CASES, ran, strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_refused_in_one_sentence(
    name: str, refused: dict[str, tuple[Turn, Path]], inputs: Path
) -> None:
    if name == "nccl" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    turn, out = refused[name]
    assert turn.code == 2
    sentences = turn.stderr.splitlines()
    assert len(sentences) == 1, turn.stderr
    pattern = CASES[name][1].replace("P/", f"{re.escape(str(inputs))}/")
    assert re.fullmatch(pattern, sentences[0]), sentences[0]
    assert not out.exists()


def test_a_refused_job_does_not_change_the_run(
    refused: dict[str, tuple[Turn, Path]], inputs: Path
) -> None:
    assert refused["other configuration"][0].code == 2
    config = json.loads((inputs / "done" / "config.json").read_text())
    assert (config["lr"], config["arch"]) == (0.4, "resnet20")
    assert not (inputs / "broken" / "config.json").exists()
    for folder in directory.list_steps(inputs / "done" / "checkpoints"):
        directory.verify(folder)


# Bad input in separate jobs, as a user starts them


def test_bad_usage_ends_the_job(tmp_path: Path) -> None:
    job = train(2, "--epochs=0", "--out", tmp_path / "out")
    assert job.returncode == 2
    (line,) = own_lines(job.stderr)
    values = ("mpiddp train: ", "--epochs: ", "'0'", "mpiddp train --help")
    assert re.fullmatch(error("--help", *values), line), line
    assert job.stdout == ""


def test_an_error_that_only_rank_0_finds_ends_the_job(inputs: Path, tmp_path: Path) -> None:
    job = train(2, *QUICK, f"--resume={inputs / 'broken'}", "--out", tmp_path / "out")
    assert job.returncode == 2
    (sentence,) = own_lines(job.stderr)
    none = error("no verified", f"{inputs / 'broken'}: ")
    assert re.fullmatch(none, sentence), sentence


def test_a_broken_image_of_one_rank_during_training(tmp_path: Path) -> None:
    """The other rank waits in an all-reduce, and prints no error."""
    images = tiny_data.image_folder(tmp_path / "images", 8, 2)
    broken = images / "train" / "dog" / "3.jpg"
    broken.write_bytes(broken.read_bytes()[:200])
    job = train(
        2, "--dataset=image-folder", f"--data-dir={images}", "--image-size=32", "--batch-size=2",
        "--arch=resnet20", "--epochs=1", "--num-workers=1", "--out", tmp_path / "out",
    )  # fmt: skip
    assert job.returncode == 2
    (sentence,) = own_lines(job.stderr)
    assert re.fullmatch(error("Replace or", f"{broken}: Pillow "), sentence), sentence
    logs = [log.read_text() for log in sorted((tmp_path / "out" / "logs").iterdir())]
    assert sum("UserError" in log for log in logs) == 1  # its traceback


FOLDER: Command = [
    "--dataset=image-folder", "--image-size=32", "--arch=resnet20", "--batch-size=2",
    "--epochs=1", "--num-workers=0",
]  # fmt: skip


def test_a_resume_with_other_data_is_refused(tmp_path: Path, pool: Ranks) -> None:
    data = [tiny_data.image_folder(tmp_path / name, 4, 2) for name in ("one", "moved", "other")]
    (data[2] / "train" / "dog" / "3.jpg").rename(data[2] / "train" / "dog" / "4.jpg")
    out = tmp_path / "out"
    stop = ["--stop-at-step=1", "--out", out]
    command: Command = [*FOLDER, "--data-dir"]
    first, other, moved = pool.run(
        2, tmp_path, [[*command, data[0], *stop], [*command, data[2], "--out", out],
        [*command, data[1], "--out", out]],
    )  # fmt: skip
    assert (first.code, other.code, moved.code) == (75, 2, 0), other.stderr
    (sentence,) = own_lines(other.stderr)
    values = ("step 1 ", "--data-dir", "--out OTHER --weights ", "model.pt")
    assert re.fullmatch(error("same --data-dir", *values), sentence), sentence
    names = re.findall(r"12 \+ 6 images of 3 classes, names ([0-9a-f]{16})\b", sentence)
    assert len(names) == len(set(names)) == 2, sentence


def test_hosts_with_different_data_are_refused(tmp_path: Path) -> None:
    data = [tiny_data.image_folder(tmp_path / str(count), count, 2) for count in (8, 4)]
    command = ["-m", "mpiddp", "train", *map(str, FOLDER), "--out", str(tmp_path / "out")]
    other = [":", "-np", "1", sys.executable, *command, "--data-dir", str(data[1])]
    job = mpirun(1, *command, "--data-dir", str(data[0]), *other)
    assert job.returncode == 2
    (sentence,) = own_lines(job.stderr)
    images = [f"{count} + 6 images of 3 classes, names " for count in (24, 12)]
    values = ("data set", images[0], " (rank 0 on ", images[1], " (rank 1 on ", "--data-dir")
    assert re.fullmatch(error("differs:", *values), sentence), sentence
    assert len(re.findall(r"names [0-9a-f]{16} \(", sentence)) == 2, sentence
    assert not (tmp_path / "out").exists()


def test_a_damaged_summary_and_records_are_repaired(
    inputs: Path, tmp_path: Path, pool: Ranks
) -> None:
    out = tmp_path / "done"
    shutil.copytree(inputs / "done", out)
    (out / "summary.json").write_bytes(b"")
    with (out / "metrics.jsonl").open("a") as file:
        file.write('12\n{"step": 2')
    (again,) = pool.run(2, tmp_path, [[*QUICK, "--epochs=1", "--save-every=1", "--out", out]])
    assert (again.code, again.stderr) == (0, "")
    assert summary(out)["steps"] == 2
    assert [record["step"] for record in records(out)] == [2]


def test_a_summary_of_another_step_is_replaced(inputs: Path, tmp_path: Path, pool: Ranks) -> None:
    out = tmp_path / "done"
    shutil.copytree(inputs / "done", out)
    save_json(out / "summary.json", {**summary(out), "steps": 1})
    (again,) = pool.run(2, tmp_path, [[*QUICK, "--epochs=1", "--save-every=1", "--out", out]])
    assert (again.code, again.stderr) == (0, "")
    assert (summary(out)["steps"], summary(out)["images_per_s"]) == (2, None)


def test_a_rank_that_cannot_open_its_log_is_refused(
    inputs: Path, tmp_path: Path, pool: Ranks
) -> None:
    (tmp_path / "out/logs/rank_00001.log").mkdir(parents=True)
    (refused,) = pool.run(2, tmp_path, [[*QUICK, "--epochs=1", "--out", tmp_path / "out"]])
    assert refused.code == 2
    (line,) = own_lines(refused.stderr)
    where = f"rank 1 on {socket.gethostname()}: {tmp_path}/out/logs/rank_00001.log: "
    assert re.fullmatch(error(":", f"{where}Is a directory"), line), line


def test_a_loss_that_is_no_number_is_named_once(tmp_path: Path, pool: Ranks) -> None:
    options = [*QUICK, "--epochs=2", "--lr=1e300", "--log-every=1", "--out", tmp_path / "out"]
    (done,) = pool.run(2, tmp_path, [options])
    assert done.code == 0
    (warning,) = own_lines(done.stderr)
    assert re.fullmatch(
        r"warning: the loss is (nan|inf) at step 2\. Stop the run, and continue from an earlier .*",
        warning,
    )


FULL_DISK = """
import resource, sys
from mpiddp.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, 600_000))  # half of a model.pt
sys.exit(main(["train", *sys.argv[1:]]))
"""


def test_a_full_disk_keeps_the_older_checkpoint(tmp_path: Path) -> None:
    command = [*map(str, QUICK), "--epochs=1", "--save-every=1", "--out", str(tmp_path)]
    first = alone("-m", "mpiddp", "train", *command, "--stop-at-step=1")
    assert first.returncode == 75
    second = alone("-c", FULL_DISK, *command)
    assert second.returncode == 1
    values = (f"{tmp_path}/checkpoints: ", "step 2", "File too large", "step_00000001")
    sentence = error("", *values)
    assert re.fullmatch(rf"warning: 1 of 1 saves failed\.\n{sentence}\n", second.stderr)
    (kept,) = (tmp_path / "checkpoints").iterdir()
    directory.verify(kept)


def alone(*python_args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *python_args],
        env=clean_env(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
