"""This version resumes a checkpoint of version 0.1.0, which is part of the tests' data.

python -m pytest tests/test_checkpoint_of_0_1_0.py

The run was `mpiddp launch -n 2 -m mpiddp train` with OPTIONS, stopped after step 3 of 6. metrics.jsonl
has all six steps of that version.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.ranks import launch

RUN = Path(__file__).parent / "data" / "run_of_0.1.0"
OPTIONS = (
    *("--use-syn", "--arch", "resnet20", "--batch-size", "4", "--epochs", "1"),
    *("--steps-per-epoch", "6", "--amp", "off", "--log-every", "1", "--save-every", "3"),
    *("--keep", "5"),
)


def records(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_of_0_1_0_resumes_with_the_same_losses(tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(RUN, out)
    done = launch("-n", "2", "-m", "mpiddp", "train", *OPTIONS, "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "step_00000003: step 3, epoch 0" in done.stdout
    before, after = records(RUN), records(out)
    assert [each["step"] for each in after] == [1, 2, 3, 4, 5, 6]
    assert after[:3] == before[:3]  # unchanged
    # Another processor adds in another order, which changes the losses in about the fourth digit.
    losses, expected = ([each["train_loss"] for each in found[3:]] for found in (after, before))
    assert losses == pytest.approx(expected, rel=1e-3)


def test_config_json_is_the_same_as_in_0_1_0(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = launch("-n", "2", "-m", "mpiddp", "train", *OPTIONS, "--out", str(out))
    assert done.returncode == 0, done.stderr
    written, kept = (json.loads((each / "config.json").read_text()) for each in (out, RUN))
    assert written.pop("out") == str(out)
    later = {  # 0.1.0 had no such options
        "clip_grad_norm": None,
        "parallel": "ddp",
        "per_rank_log": False,
        "check_determinism": None,
        "check_divergence": None,
    }
    assert {name: written.pop(name) for name in later} == later
    del kept["out"], kept["cache"]
    assert written == kept
