"""examples/series: each script runs under its launchers, and all compute the same losses.

python -m pytest tests/ranks/examples/test_series.py
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.errors import error
from tests.support.patience import PATIENCE_S
from tests.support.ranks import clean_env, own_lines, run_command, run_forked
from tests.support.series import SERIES, losses, run, start

STEPS = ("one_device.py", "one_host.py", "many_hosts.py", "sharded.py")
EPOCHS = 4
SIZES = ("--samples", "256", "--batch-size", "32")
# Sums in another order. After 32 steps the losses of float32 still agree to 6 digits.
TOLERANCE = 1e-4
LAUNCHERS = ("python", "mpiddp launch", "mpirun", "torchrun")
# What differs between launchers is in mpiddp.process_group(), which both scripts call.
LAUNCHED = [*(("many_hosts.py", launcher) for launcher in LAUNCHERS), ("sharded.py", "python")]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of one device."""
    folder = tmp_path_factory.mktemp("one")
    done = run("python", "one_device.py", EPOCHS, "2", *SIZES, folder=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert (folder / "runs/one_device/snapshot.pt").exists()
    found = losses(done.stdout)
    assert list(found) == list(range(1, EPOCHS + 1))
    assert found[EPOCHS] < 0.9 * found[1]  # it learns, so wrong gradients would change the losses
    return found


def test_two_processes_of_one_host_compute_the_losses_of_one(
    tmp_path: Path, expected: dict[int, float]
) -> None:
    """In a copy: the series needs nothing but its folder."""
    shutil.copytree(SERIES, tmp_path / "series")
    command = [sys.executable, "series/one_host.py", str(EPOCHS), "3", *SIZES]
    done = run_command(command, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert losses(done.stdout) == pytest.approx(expected, rel=TOLERANCE)
    assert (tmp_path / "runs/one_host/snapshot.pt").exists()


@pytest.mark.parametrize(("script", "launcher"), LAUNCHED)
def test_every_launcher_computes_the_losses_of_one_device_and_resumes(
    tmp_path: Path, expected: dict[int, float], script: str, launcher: str
) -> None:
    first = run(launcher, script, 2, "1", *SIZES, folder=tmp_path)
    assert first.returncode == 0, first.stderr
    second = run(launcher, script, EPOCHS, "1", *SIZES, folder=tmp_path)
    assert second.returncode == 0, second.stderr
    run_folder = f"runs/{script.removesuffix('.py')}"
    assert f"resuming from {run_folder}/checkpoints/step_00000002: step 2\n" in second.stdout
    assert list(losses(second.stdout)) == [3, 4]
    assert losses(first.stdout) | losses(second.stdout) == pytest.approx(expected, rel=TOLERANCE)


def test_a_sharded_run_resumes_with_another_number_of_ranks(
    tmp_path: Path, expected: dict[int, float]
) -> None:
    first = run("mpiddp launch", "sharded.py", 2, "1", *SIZES, folder=tmp_path)
    assert first.returncode == 0, first.stderr
    assert losses(first.stdout) == pytest.approx({1: expected[1], 2: expected[2]}, rel=TOLERANCE)
    second = run("python", "sharded.py", EPOCHS, "1", *SIZES, folder=tmp_path)
    assert second.returncode == 0, second.stderr
    assert losses(second.stdout) == pytest.approx({3: expected[3], 4: expected[4]}, rel=TOLERANCE)


@pytest.mark.parametrize("script", STEPS[2:])
def test_sigterm_saves_and_the_same_command_resumes(tmp_path: Path, script: str) -> None:
    """Every epoch has one step, and only the stop saves."""
    sizes = ("--samples", "32", "--batch-size", "32", "--out", str(tmp_path / "run"))
    command = [*start("mpiddp launch"), str(SERIES / script), "1000000", "1000000", *sizes]
    with subprocess.Popen(
        command, env=clean_env(), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:  # fmt: skip
        assert process.stdout is not None
        before = ""
        while "epoch 3: " not in before:
            line = process.stdout.readline()
            assert line, process.communicate(timeout=PATIENCE_S)[1]
            before += line
        process.send_signal(signal.SIGTERM)
        rest, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 75, stderr
    step = max(losses(before + rest))
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == [f"step_{step:08d}"]
    resumed = run("mpiddp launch", script, step + 1, "1000000", *sizes, folder=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert f"step_{step:08d}: step {step}\n" in resumed.stdout
    sizes = (*sizes[:4], "--out", "whole")
    whole = run("mpiddp launch", script, step + 1, step + 1, *sizes, folder=tmp_path)
    assert losses(resumed.stdout) == {step + 1: losses(whole.stdout)[step + 1]}


MISTAKES = {
    "no epochs": (("0", "1"), "{script}: total_epochs: expected 1 or more, not 0."),
    "save_every 0": (("1", "0"), "{script}: save_every: expected 1 or more, not 0."),
    "not a number": (("1", "x"), "{script}: argument save_every: invalid int value: 'x'. See: "),
    "empty data set": (
        ("1", "1", "--samples", "0"),
        "the data set is empty. Name a number of samp",
    ),
    "few samples": (
        ("1", "1", "--samples", "9"),
        "the data set has 9 samples, fewer than a step t",
    ),
}


def starts_of(script: str) -> list[str]:
    return ["python"] if script in STEPS[:2] else ["mpiddp launch"]


@pytest.mark.parametrize("script", STEPS)
def test_bad_input_is_one_sentence(tmp_path: Path, script: str) -> None:
    """In a single process; with a launcher below."""
    commands = [[str(SERIES / script), *arguments] for arguments, _ in MISTAKES.values()]
    ends = run_forked(commands, tmp_path)
    for (_, sentence), (code, stdout, stderr) in zip(MISTAKES.values(), ends, strict=True):
        assert (code, stdout) == (2, "")
        (line,) = own_lines(stderr)
        assert line.removeprefix("[rank0]: ").startswith(sentence.format(script=script))  # torch's
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", STEPS[1:])
def test_ranks_that_cannot_divide_a_step_say_so_once(tmp_path: Path, script: str) -> None:
    (launcher,) = starts_of(script)
    done = run(launcher, script, "1", "1", "--batch-size", "33", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert own_lines(done.stderr) == ["--batch-size 33 is not divisible by 2 ranks."]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("launcher", ["python", "mpirun", "torchrun"])
def test_bad_input_is_one_sentence_under_every_launcher(tmp_path: Path, launcher: str) -> None:
    done = run(launcher, "many_hosts.py", "1", "0", folder=tmp_path)
    assert done.returncode == (1 if launcher == "torchrun" else 2), done.stderr
    first = (
        done.stderr.splitlines()[0].removeprefix("[rank0]: ").removeprefix("[rank1]: ")
    )  # torch's
    assert first == "many_hosts.py: save_every: expected 1 or more, not 0."
    assert done.stderr.count("save_every") == 1
    assert "Traceback" not in done.stderr or launcher == "torchrun"  # its own


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two scripts, each in a folder with its name."""
    folder = tmp_path_factory.mktemp("runs")
    for script in ("many_hosts.py", "sharded.py"):
        made = run("python", script, 1, 1, *SIZES, "--out", script, folder=folder)
        assert made.returncode == 0, made.stderr
    return folder


@pytest.mark.parametrize("script", STEPS)
def test_a_folder_of_another_run_is_refused(runs: Path, script: str) -> None:
    (launcher,) = starts_of(script)
    other = "sharded.py" if script == "many_hosts.py" else "many_hosts.py"
    before = sorted(runs.rglob("*"))
    done = run(launcher, script, 2, 1, *SIZES, "--out", other, folder=runs)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = own_lines(done.stderr)
    foreign = rf"(rank 0 on \S+: )?{other}\S* is the folder of another run"
    assert re.match(rf"{foreign}|{error('same config', other)}", line), line
    assert sorted(runs.rglob("*")) == before
