"""--log-to with the real packages: each tool gets each record once, in one run over stops and resumes.

python -m tests.support.frameworks install; python -m pytest tests/frameworks/test_log_to.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpiddp.checkpoints.run_dir import RunDir
from mpiddp.runtime.log import log_to_console
from mpiddp.train.log_to import logged_to
from tests.support import frameworks
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT, clean_env, mpirun
from tests.support.tiny_data import two_epochs
from tests.support.training import records

# What TensorBoard shows, by its own reader.
READ = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1])
events.Reload()
scalars = {tag: [[e.step, e.value] for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
print(json.dumps([scalars, events.Tags()["tensors"]]))
"""


def test_tensorboard_has_each_record_once_after_a_stop_and_a_resume(tmp_path: Path) -> None:
    env = frameworks.environment("tensorboard")
    options = map(str, two_epochs(tmp_path, "--batch-size=4", "--log-every=1", "--log-to"))
    run, train = tmp_path / "run", ("-m", "mpiddp", "train", *options, "tensorboard")
    stopped = mpirun(1, *train, f"--out={run}", "--stop-at-step=2", env=env)
    assert stopped.returncode == 75, stopped.stderr
    # As after a crash: the tool has records that the run drops, because it repeats these steps.
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 3, "train_loss": 7.0}\n')
    follow(run, "tensorboard", env)
    done = mpirun(1, *train, f"--out={run}", env=env)
    assert done.returncode == 0, done.stderr
    follow(run, "tensorboard", env)  # nothing, unless this machine is too slow for the tool's 20 s

    command = [sys.executable, "-c", READ, str(run / "tensorboard")]
    read = subprocess.run(
        command, env=clean_env() | env, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert read.returncode == 0, read.stderr
    scalars, texts = json.loads(read.stdout)
    assert texts == ["config/text_summary"]
    for name in ("train_loss", "lr", "test_accuracy"):
        expected = [[each["step"], each[name]] for each in records(run) if name in each]
        assert scalars[name] == [[step, pytest.approx(value)] for step, value in expected], name
    sent = json.loads((run / "log_to/tensorboard.json").read_text())
    assert sent["bytes"] == (run / "metrics.jsonl").stat().st_size


def follow(run: Path, tool: str, env: dict[str, str]) -> None:
    """Let the tool take the records that it does not have."""
    size = (run / "metrics.jsonl").stat().st_size
    done = subprocess.run(
        [sys.executable, "-m", "mpiddp.train.sinks", tool, str(run), str(size)],
        env=clean_env() | env,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_a_tool_that_fails_costs_one_warning(tmp_path: Path) -> None:
    env = frameworks.environment("tensorboard")
    options = map(str, two_epochs(tmp_path, "--batch-size=4", "--log-to=tensorboard"))
    run = tmp_path / "run"
    run.mkdir()
    (run / "tensorboard").write_text("in the way")
    done = mpirun(1, "-m", "mpiddp", "train", *options, f"--out={run}", env=env)
    assert done.returncode == 0, done.stderr
    (warning,) = [line for line in done.stderr.splitlines() if "warning" in line]
    assert warning.startswith("warning: --log-to tensorboard: FileExistsError: ")
    assert warning.endswith(f"See: {run}/logs/log_to_tensorboard.log")
    assert "Traceback" in (run / "logs/log_to_tensorboard.log").read_text()


def test_a_process_that_was_forked_does_not_keep_the_records_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As the workers of a DataLoader, which end with their rank."""
    for name, value in frameworks.environment("tensorboard").items():
        monkeypatch.setenv(name, value)
    run = RunDir(tmp_path)
    run.logs.mkdir()
    run.config.write_text("{}")
    run.metrics.write_text('{"step": 1, "loss": 2.0}\n')
    stays, ends = os.pipe()
    log_to_console(0)
    with logged_to("tensorboard", run):
        child = os.fork()
        if child == 0:
            os.close(ends)
            os.read(stays, 1)
            os._exit(0)
        deadline = time.monotonic() + PATIENCE_S
        while not (tmp_path / "log_to/tensorboard.json").exists():  # from here on it ends quickly
            assert time.monotonic() < deadline
            time.sleep(0.1)
    os.close(ends)
    os.waitpid(child, 0)
    os.close(stays)
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize(("tool", "package"), [("wandb", "wandb"), ("mlflow", "mlflow_skinny")])
def test_the_other_tools_keep_one_run(tmp_path: Path, tool: str, package: str) -> None:
    env = frameworks.environment(package) | {"HOME": str(tmp_path)}
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    run.config.write_text('{"lr": 0.1, "save_every": {"steps": 2}, "out": null}')
    ids = set()
    for last in (2, 4):
        lines = [json.dumps({"step": step, "loss": 1 / step}) for step in range(1, last + 1)]
        run.metrics.write_text("\n".join(lines) + "\n")
        follow(run.path, tool, env)
        sent = json.loads((run.path / f"log_to/{tool}.json").read_text())
        assert sent["bytes"] == run.metrics.stat().st_size
        ids.add(sent["id"])
    assert len(ids) == 1
    if tool == "wandb":
        assert len(list(run.path.glob(f"wandb/offline-run-*-{ids.pop()}/*.wandb"))) == 2
    else:
        (losses,) = run.path.glob(f"mlflow/*/{ids.pop()}/metrics/loss")
        assert [line.split()[2] for line in losses.read_text().splitlines()] == ["1", "2", "3", "4"]
