"""examples/gpt/train.py learns, resumes with the same bits under every launcher, and refuses bad texts.

Tests examples/gpt/train.py, data.py, options.py and curve.py.
python -m pytest tests/ranks/examples/test_gpt.py
"""

from __future__ import annotations

import math
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpiddp.checkpoints import folder as directory
from tests.support.errors import error
from tests.support.gpt import BAD_INPUT, STEPS, TINY, bad_texts, run, weights
from tests.support.patience import PATIENCE_S
from tests.support.ranks import (
    LAUNCH,
    ROOT,
    clean_env,
    mpirun,
    mpirun_command,
    own_lines,
    run_forked,
)
from tests.support.training import records, unequal

SCRIPT = str(ROOT / "examples/gpt/train.py")
DRAWN = random.Random(0)
TEXT = "".join(f"{DRAWN.randrange(10)} is {DRAWN.choice(['odd', 'even'])}.\n" for _ in range(400))
LAUNCHERS = {
    "mpiddp launch": [*LAUNCH, "-H", "localhost:2"],
    "mpirun alone": mpirun_command(2),
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"],
}


def command(launcher: list[str], *options: str) -> list[str]:
    return [*launcher, SCRIPT, "--text=text", "--out=run", *TINY, *options]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run of two ranks, with its text and its output."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "text").write_text(TEXT)
    done = run(command(LAUNCHERS["mpiddp launch"], "--save-every=100"), folder)
    assert (done.returncode, done.stderr) == (0, "")
    (folder / "stdout").write_text(done.stdout)
    return folder


def test_the_loss_falls_from_that_of_guessing(whole: Path) -> None:
    """The text is predictable but for a digit (2.3 nats) and one of two words (0.7), in 11 characters."""
    found = records(whole / "run")
    losses = [each["validation_loss"] for each in found if "validation_loss" in each]
    assert [each["step"] for each in found] == [1, *range(20, STEPS + 1, 20)]
    guessing = math.log(len(set(TEXT)))
    assert found[0]["loss"] == pytest.approx(guessing, abs=0.1)
    assert losses[0] == pytest.approx(guessing, abs=0.1)
    assert losses[-1] < 0.6
    assert len(losses) == 1 + STEPS // 100
    assert found[-1]["cpu_s"] > found[0]["cpu_s"] > 0


def test_it_ends_with_what_the_model_writes(whole: Path) -> None:
    output = (whole / "stdout").read_text()
    sampled = output.partition("\n\n")[2]
    assert len(sampled) > 400
    assert set(sampled) <= set(TEXT)
    whole_lines = sampled.splitlines()[1:-1]
    known = set(TEXT.splitlines())
    assert sum(line in known for line in whole_lines) > 0.6 * len(whole_lines), sampled


def stop_after(step: int, command: list[str], folder: Path) -> None:
    """Start a training in the folder, and stop it once its record of this step is there."""
    with subprocess.Popen(
        command, env=clean_env(), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:  # fmt: skip
        wait_for_record(folder / "run/metrics.jsonl", step)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 75, stderr


@pytest.mark.slow
def test_the_default_training_learns_the_shipped_text(tmp_path: Path) -> None:
    """From nearly a guess (4.63), in the first half of its steps: it is stopped then.

    The limit is of processor time, which no other load uses up.
    """
    stop_after(300, [*LAUNCHERS["mpiddp launch"], SCRIPT, "--out=run"], tmp_path)
    found = {each["step"]: each for each in records(tmp_path / "run")}
    assert 4.4 < found[1]["validation_loss"] < 4.7
    assert found[300]["validation_loss"] < 1.6
    assert found[300]["cpu_s"] < 90


def test_the_curve_of_a_run(whole: Path, tmp_path: Path) -> None:
    script = str(ROOT / "examples/gpt/curve.py")
    done = run([sys.executable, script, str(whole / "run"), "curve.png"], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    for arguments in (["missing", "curve.png"], [str(whole / "run"), "curve.txt2"]):
        done = run([sys.executable, script, *arguments], tmp_path)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr


def test_a_stopped_training_resumes_with_the_same_bits(whole: Path, tmp_path: Path) -> None:
    shutil.copy(whole / "text", tmp_path)
    launched = command(LAUNCHERS["mpiddp launch"], "--save-every=100000")
    stop_after(20, launched, tmp_path)
    (saved,) = directory.list_steps(tmp_path / "run/checkpoints")
    assert 1 <= directory.step_of(saved) < STEPS
    done = run(launched, tmp_path)
    assert done.returncode == 0, done.stderr
    assert unequal(weights(tmp_path / "run"), weights(whole / "run")) == []
    shown = ("step", "loss", "lr", "validation_loss")
    assert [[each.get(name) for name in shown] for each in records(tmp_path / "run")] == [
        [each.get(name) for name in shown] for each in records(whole / "run")
    ]


def wait_for_record(path: Path, step: int) -> None:
    """Wait for the record of a step. Before the first step ends, a stop would end the ranks at once."""
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists() or f'"step": {step},' not in path.read_text():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


@pytest.mark.parametrize("launcher", ["mpirun alone", "torchrun"])
def test_the_same_bits_under_other_launchers(whole: Path, tmp_path: Path, launcher: str) -> None:
    """Each resumes from step 300 of the whole run. test_own_script.py has `mpirun … mpiddp run`."""
    folder = without_last_checkpoint(whole, tmp_path)
    done = run(command(LAUNCHERS[launcher]), folder)
    assert done.returncode == 0, done.stderr
    assert unequal(weights(folder / "run"), weights(whole / "run")) == []


def test_one_process_without_a_launcher_has_the_same_batches(whole: Path, tmp_path: Path) -> None:
    """The sums of one rank differ from those of two by their rounding only."""
    folder = without_last_checkpoint(whole, tmp_path)
    done = run(command([sys.executable]), folder)
    assert done.returncode == 0, done.stderr
    ours, theirs = records(folder / "run")[-1], records(whole / "run")[-1]
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-2)
    assert ours["validation_loss"] == pytest.approx(theirs["validation_loss"], rel=1e-2)


def without_last_checkpoint(whole: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "copy"
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / f"run/checkpoints/step_{STEPS:08d}")
    assert [each.name for each in directory.list_steps(folder / "run/checkpoints")] == [
        "step_00000300"
    ]
    return folder


def test_a_run_with_other_options_or_another_text_is_refused(whole: Path, tmp_path: Path) -> None:
    folder = without_last_checkpoint(whole, tmp_path)
    done = run(command([sys.executable], "--lr=0.1"), folder)
    assert done.returncode == 2, done.stderr
    sentence = error("same config", ": lr 0.004, now 0.1. ")
    assert re.search(sentence, done.stderr), done.stderr
    (folder / "text").write_text(TEXT + "x")
    done = run(command([sys.executable]), folder)
    assert done.returncode == 2, done.stderr
    assert re.search(error("same config", ": text "), done.stderr), done.stderr


def test_bad_input_is_one_sentence_and_code_2(tmp_path: Path) -> None:
    bad_texts(tmp_path)
    (tmp_path / "text").write_text(TEXT)
    before = sorted(tmp_path.iterdir())
    options = [option for option in BAD_INPUT if option != "--batch-size=3"]  # that needs two ranks
    ends = run_forked([command([], option) for option in options], tmp_path)
    for option, (code, _, stderr) in zip(options, ends, strict=True):
        assert code == 2, stderr
        (line,) = own_lines(stderr)
        assert line.removeprefix("[rank0]: ").startswith(BAD_INPUT[option])  # torch's
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("option", ["--text=empty", "--batch-size=3"])
def test_bad_input_ends_all_ranks_with_code_2_and_one_sentence(tmp_path: Path, option: str) -> None:
    bad_texts(tmp_path)
    (tmp_path / "text").write_text(TEXT)
    before = sorted(tmp_path.iterdir())
    done = run(command(LAUNCHERS["mpirun alone"], option), tmp_path)
    assert done.returncode == 2, done.stderr
    (line,) = own_lines(done.stderr)
    assert line.startswith(BAD_INPUT[option])
    assert sorted(tmp_path.iterdir()) == before


# Each rank in a folder of its own, as hosts that share no file system.
OWN_FOLDERS = """
import os, runpy, sys
os.chdir(os.environ["OMPI_COMM_WORLD_RANK"])
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_ranks_that_read_other_texts_are_refused(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "text").write_text(TEXT + "x" * rank)
    done = mpirun(2, "-c", OWN_FOLDERS, SCRIPT, "--text=text", *TINY, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    line, *more = own_lines(done.stderr)
    assert more == []
    assert line.startswith("text on rank 1 differs from that on rank 0. ")
