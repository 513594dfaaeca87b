"""The records that a tool gets from metrics.jsonl, and the names of tools.

Tests mpiddp/train/sinks.py.
python -m pytest tests/unit/train/test_sink_records.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mpiddp.errors import UserError
from mpiddp.train.options import parse
from mpiddp.train.sinks import check_packages, read_records
from tests.support.errors import error


def test_an_incomplete_line_waits_for_its_end(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 2, "loss": 0.5}\n{"step": 4, "lo')
    first, end = read_records(metrics, 0)
    assert (first, end) == ([{"step": 2, "loss": 0.5}], 25)
    assert read_records(metrics, end) == ([], 25)
    metrics.write_text('{"step": 2, "loss": 0.5}\n{"step": 4, "loss": null}\n')
    assert read_records(metrics, end) == ([{"step": 4, "loss": None}], 51)
    assert read_records(metrics, 0, 25) == (first, 25)


def test_lines_that_are_no_records_are_left_out(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('cut\n[1]\n{}\n{"step": "x"}\nnull\n{"step": 1}\n')
    assert read_records(metrics, 0)[0] == [{"step": 1}]


def test_a_tool_whose_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    install = f"Run: {sys.executable} -m pip install mlflow "
    missing = error("--log-to", "--log-to mlflow ", f" {sys.executable} ", install)
    with pytest.raises(UserError, match=rf"^{missing}$"):
        check_packages("mlflow")
    check_packages(None)


def test_tools_are_named_once() -> None:
    assert parse(["--log-to", "wandb,mlflow,wandb"]).log_to == "wandb,mlflow"
    tools = "tensorboard, wandb, mlflow, trackio"
    for unknown in ("wandv", "", "wandb,", "wandb mlflow"):
        with pytest.raises(UserError, match=error("--help", " --log-to: ", tools)):
            parse([f"--log-to={unknown}"])
