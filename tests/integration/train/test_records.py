"""What a run leaves beside its checkpoints, and the tools that follow its records.

Tests mpiddp/train/records.py, tools.py.
python -m pytest tests/integration/train/test_records.py
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mpiddp
from mpiddp.errors import UserError
from mpiddp.runtime.job.session import current
from mpiddp.train import tools
from mpiddp.train.config import SINKS
from mpiddp.train.records import commit_of, table


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """The folder of a run whose records may be written."""
    with mpiddp.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.resume()
        yield tmp_path / "run"
    current().run = None


def test_records_reach_a_tool_that_a_resume_continues(run, monkeypatch):
    got: list[Any] = []

    def open_run(folder: Path, config: tools.Config, run_id: str, first_step: int) -> tools.Sink:
        got.append((run_id, first_step))
        return "an-id", lambda *each: got.append(each), lambda: got.append("end")

    monkeypatch.setitem(tools.SINKS, "mlflow", open_run)  # type: ignore[misc]
    for step in (0, 2):
        with tools.following("mlflow", run, {}, step=step) as log:
            log(step + 1, loss=0.5, note="x", best=None)
    assert got == [("", 1), (1, {"loss": 0.5}), "end", ("an-id", 3), (3, {"loss": 0.5}), "end"]
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == {"step": 1, "loss": 0.5, "note": "x", "best": None}
    assert [path.name for path in (run / "log_to").iterdir()] == ["mlflow.json"]


def test_a_tool_that_fails_is_a_warning(run, monkeypatch, caplog):
    def fail(*_: Any) -> tools.Sink:
        raise ConnectionError("no server\nat all")

    monkeypatch.setitem(tools.SINKS, "mlflow", fail)  # type: ignore[misc]
    with tools.following("mlflow", run, {}, step=0) as log:
        log(1, loss=0.5)
    (warning,) = [each.getMessage() for each in caplog.records]
    assert warning.startswith("warning: --log-to mlflow: ConnectionError: 'no server'. ")


def test_the_tools_of_the_options_are_those_of_the_table():
    assert tuple(tools.SINKS) == SINKS
    with pytest.raises(UserError, match=r"--log-to json\.missing needs json\.missing"):
        tools.check_packages("json,json.missing")


def test_the_commit_of_a_start(tmp_path):
    def git(*arguments: str) -> None:
        user = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *user, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    (tmp_path / "data.txt").write_text("a\n")
    git("add", ".")
    git("commit", "-m", "first")
    commit = commit_of(tmp_path)
    assert len(commit) == 40
    (tmp_path / "data.txt").write_text("b\n")
    assert commit_of(tmp_path) == f"{commit}-dirty"
    assert commit_of(Path("/")) == ""


def test_the_table_of_a_run_that_has_measured_nothing():
    names = ("dataset", "arch", "test_accuracy", "train_loss", "images_per_s")
    numbers = ("num_parameters", "world_size", "num_nodes", "steps", "global_batch_size", "wall_s")
    times = ("step_time_p50_s", "step_time_p95_s")
    summary: dict[str, Any] = {**dict.fromkeys((*names, *times)), **dict.fromkeys(numbers, 3)}
    shown = table({**summary, "hosts": {"a": 3}, "phases": {}}, Path("runs/a"))
    assert "images/s       - over all ranks" in shown
    assert "test accuracy  no test set" in shown
