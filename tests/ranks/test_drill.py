"""`mpiddp drill` names the defect of a script, and passes one that is right.

python -m pytest tests/ranks/test_drill.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import frameworks
from tests.support.own_script import EXAMPLE, example
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT, clean_env

DRILL = (sys.executable, "-m", "mpiddp", "drill")
SCRIPT = str(ROOT / "tests/jobs/drill/script.py")


def drill(
    *arguments: str, cwd: Path = ROOT, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*DRILL, *arguments], env=clean_env(env), cwd=cwd, capture_output=True, text=True,
        timeout=PATIENCE_S,
    )  # fmt: skip


def results(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode in (0, 1), done.stderr
    return {each["fault"]: each for each in json.loads(done.stdout)}


# defect: the fault that shows it, the ranks, and the words of the cause
DEFECTS = {
    "scheduler": ("kill", 1, "the scheduler is not in the checkpoint (learning rate 0.1 at the"),
    "warm-up": ("kill", 1, "the warm-up begins anew (learning rate "),
    "random": ("kill", 1, "the random numbers after the resume are not those"),
    "position": ("kill", 1, "the resumed run reads the samples of step "),
    "set_epoch": ("kill", 1, "the resumed run repeats epoch 0's order: call sampler.set_epoch"),
    "all ranks": ("none", 2, "ranks 0, 1 write into one file, newest.pt: save on rank 0 alone"),
    "non-atomic": ("kill-in-save", 1, "the checkpoint is torn ("),
    "rank 0 alone": ("kill", 2, "load the checkpoint on every rank"),
    "moved optimizer": ("kill", 1, "the optimizer updates tensors that are no longer the model's"),
    "weights_only": ("kill", 1, "save tensors, numbers and strings alone"),
    "save in handler": ("sigterm", 1, "the script saves within its signal handler"),
    "worker": ("sigterm", 1, "the signal ended a DataLoader worker before its rank could save"),
    "buffers": ("kill", 1, "the model's buffers, such as BatchNorm's statistics, are not in the"),
    "never": ("kill", 1, "no checkpoint was written within 36 steps: nothing survives"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_the_defect_is_named(tmp_path: Path, defect: str) -> None:
    fault, ranks, words = DEFECTS[defect]
    number = ("-n", str(ranks), "--only", fault, "--seed", "3", "--json")
    done = drill(*number, "--work", str(tmp_path / "work"), SCRIPT, "{out}", defect)
    assert done.returncode == 1, done.stderr
    result = results(done)[fault]
    assert not result["passed"]
    assert words in result["cause"]
