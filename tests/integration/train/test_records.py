"""What a run leaves beside its checkpoints, and the tools that follow its records.

Tests mpiddp/train/record.py, sinks.py, measure.py.
python -m pytest tests/integration/train/test_records.py
"""

from __future__ import annotations

import json
import subprocess
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from mpiddp.errors import UserError
from mpiddp.train import sinks
from mpiddp.train.measure import table
from mpiddp.train.options import SINKS
from mpiddp.train.record import git_state, save_json

Records = list[tuple[int, dict[str, float]]]


class Polls:
    """An event that is set after so many waits."""

    def __init__(self, count: int, at_wait: Any = None) -> None:
        self._left, self._at_wait = count, at_wait

    def wait(self, timeout: float) -> bool:
        self._left -= 1
        if self._at_wait is not None:
            self._at_wait()
        return self._left <= 0


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Records:
    """What a tool gets. Its name is that of a package, but it keeps the records in a list."""
    got: Records = []

    def open_run(facts: sinks.RunFacts) -> sinks.Sink:
        got.append((-1, {"first_step": facts.first_step}))
        return sinks.Sink("an-id", lambda *record: got.append(record), lambda: None)

    monkeypatch.setitem(sinks.SINKS, "mlflow", open_run)  # type: ignore[misc]
    return got


def write(run: Path, *steps: int) -> None:
    lines = [json.dumps({"step": step, "loss": 1 / step, "note": "x"}) + "\n" for step in steps]
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(lines)


def test_each_record_is_sent_once_over_a_resume(tmp_path: Path, sent: Records) -> None:
    write(tmp_path, 1, 2)
    sinks.follow("mlflow", tmp_path, {}, -1, Polls(1))  # type: ignore[arg-type]
    (tmp_path / "metrics.jsonl").write_text("")
    write(tmp_path, 1)  # the run resumed from step 1, and has dropped step 2
    polls = Polls(2, lambda: write(tmp_path, 2, 3) if len(sent) < 5 else None)
    sinks.follow("mlflow", tmp_path, {}, 1, polls)  # type: ignore[arg-type]
    steps = [step for step, values in sent if "loss" in values]
    assert steps == [1, 2, 2, 3]
    assert [values["first_step"] for step, values in sent if step < 0] == [0, 2]
    assert sent[1] == (1, {"loss": 1.0})


def test_a_run_without_records_writes_nothing_for_its_tools(tmp_path: Path, sent: Records) -> None:
    """An fsync a second for each tool is a load for a file server."""
    write(tmp_path, 1)
    file = tmp_path / "log_to/mlflow.json"
    written: list[int] = []
    polls = Polls(5, lambda: written.append(file.stat().st_ino))
    sinks.follow("mlflow", tmp_path, {}, -1, polls)  # type: ignore[arg-type]
    assert len(set(written)) <= 2  # at the start, and with the one record
    assert json.loads(file.read_text()) == {"id": "an-id", "step": 1}


def test_a_tool_that_fails_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(facts: sinks.RunFacts) -> sinks.Sink:
        raise ConnectionError("no server\nat all")

    monkeypatch.setitem(sinks.SINKS, "mlflow", fail)  # type: ignore[misc]
    write(tmp_path, 1)
    with sinks.following("mlflow", tmp_path, {}):
        pass
    (warning,) = [each.getMessage() for each in caplog.records]
    assert warning.startswith("warning: --log-to mlflow: ConnectionError: 'no server'. ")


def test_the_tools_of_the_options_are_those_of_the_table() -> None:
    assert tuple(sinks.SINKS) == SINKS
    with pytest.raises(UserError, match=r"--log-to json\.missing needs json\.missing"):
        sinks.check_packages("json,json.missing")


def test_a_large_change_is_not_read(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        user = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *user, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    (tmp_path / "data.txt").write_text("a\n")
    git("add", ".")
    git("commit", "-m", "first")
    found = git_state(tmp_path)
    assert found is not None
    assert (len(found["commit"]), found["dirty"]) == (40, False)
    (tmp_path / "data.txt").write_text("0123456789\n" * 2_000_000)
    tracemalloc.start()
    found = git_state(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found is not None
    assert found["dirty"]
    assert peak < 5e6
    assert git_state(Path("/")) is None


def test_json_has_no_nan(tmp_path: Path) -> None:
    save_json(tmp_path / "summary.json", {"train_loss": float("nan"), "steps": 3})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"train_loss": None, "steps": 3}


def test_the_table_of_a_run_that_has_measured_nothing() -> None:
    names = ("dataset", "arch", "test_accuracy", "train_loss", "images_per_s")
    numbers = ("num_parameters", "world_size", "num_nodes", "steps", "global_batch_size", "wall_s")
    times = ("step_time_p50_s", "step_time_p95_s")
    summary: dict[str, Any] = {**dict.fromkeys((*names, *times)), **dict.fromkeys(numbers, 3)}
    shown = table({**summary, "hosts": {"a": 3}, "phases": {}}, Path("runs/a"))
    assert "images/s       - over all ranks" in shown
    assert "test accuracy  no test set" in shown
