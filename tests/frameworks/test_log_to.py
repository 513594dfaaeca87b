"""--log-to with the real packages: each tool gets each record once, in one run over stops and resumes.

python -m tests.support.frameworks install; python -m pytest tests/frameworks/test_log_to.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import frameworks
from tests.support.patience import PATIENCE_S
from tests.support.ranks import clean_env, mpirun
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
    done = mpirun(1, *train, f"--out={run}", env=env)
    assert done.returncode == 0, done.stderr

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
    assert "metrics.jsonl has all records" in warning
