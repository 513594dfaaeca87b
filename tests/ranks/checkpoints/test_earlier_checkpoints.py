"""This version resumes the checkpoints of earlier ones, which are part of the tests' data.

Tests mpiddp/checkpoints/legacy.py.
python -m pytest tests/ranks/checkpoints/test_earlier_checkpoints.py

run_of_0.1.0 was `mpiddp launch -n 2 -m mpiddp train` with OPTIONS, stopped after step 3 of 6. metrics.jsonl
has all six steps of that version. before_one_form has runs of the last version in which a training and a
script had files of their own: the same training in shards, and a script whose state also has the whole
tensors of its model, in one piece and in shards.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import mpiddp
from mpiddp.runtime.job.session import current
from tests.support.ranks import launch
from tests.support.training import unequal

DATA = Path(__file__).parents[2] / "data"
RUN = DATA / "run_of_0.1.0"
OPTIONS = (
    *("--use-syn", "--arch", "resnet20", "--batch-size", "4", "--epochs", "1"),
    *("--steps-per-epoch", "6", "--amp", "off", "--log-every", "1", "--save-every", "3"),
    *("--keep", "5"),
)


def records(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("run", "parallel"),
    [
        (RUN, "ddp"),
        (DATA / "before_one_form/fsdp_run", "fsdp"),
        (DATA / "before_one_form/fsdp_run", "ddp"),
    ],
)
def test_a_run_resumes_with_the_same_losses(tmp_path: Path, run: Path, parallel: str) -> None:
    out = tmp_path / "run"
    shutil.copytree(run, out)
    options = (*OPTIONS, "--parallel", parallel, "--out", str(out))
    done = launch("-n", "2", "-m", "mpiddp", "train", *options)
    assert done.returncode == 0, done.stderr
    assert "step_00000003: step 3\n" in done.stdout
    before, after = records(run), records(out)
    assert [each["step"] for each in after] == [1, 2, 3, 4, 5, 6]
    assert after[:3] == before[:3]  # unchanged
    # Another processor adds in another order, which changes the losses in about the fourth digit.
    losses, expected = ([each["train_loss"] for each in found[3:]] for found in (after, before))
    assert losses == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("name", ["script", "sharded_script"])
def test_a_script_resumes(tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(DATA / "before_one_form" / name, run)
    checkpoints = mpiddp.Checkpoints(run, config={"width": 5})
    saved = checkpoints.resume()
    assert saved is not None
    assert (saved.step, saved.world_size, saved.per_rank) == (2, 2, {"position": 0})
    assert saved.state["note"] == "of 384bcf0"
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    saved.load_into(model=model, optimizer=optimizer)
    assert unequal(dict(model.state_dict()), dict(saved.state["whole"])) == []
    assert [int(state["step"]) for state in optimizer.state.values()] == [2] * 4
    checkpoints.save(3, {"model": model.state_dict()})
    checkpoints.close()
    current().run = None
    assert (run / "checkpoints/step_00000003/model.pt").exists()


def test_config_json_is_the_same_as_in_0_1_0(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = launch("-n", "2", "-m", "mpiddp", "train", *OPTIONS, "--out", str(out))
    assert done.returncode == 0, done.stderr
    written, kept = (json.loads((each / "config.json").read_text()) for each in (out, RUN))
    assert written.pop("out") == str(out)
    later = {  # 0.1.0 had no such options
        "clip_grad_norm": None,
        "low_res_epochs": 0,
        "max_shift": 2,
        "optimizer": "sgd",
        "parallel": "ddp",
        "per_rank_log": False,
        "check_determinism": None,
        "check_divergence": None,
        "log_to": None,
        "profile": None,
        "profile_ranks": "0",
    }
    assert {name: written.pop(name) for name in later} == later
    del kept["out"], kept["go_on"], kept["cache"]  # the latter two are gone
    assert written == kept
