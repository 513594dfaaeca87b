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
from tests.support.own_script import example
from tests.support.ranks import ROOT, run_command, script

DRILL = (sys.executable, "-m", "mpiddp", "drill")
SCRIPT = str(ROOT / "tests/jobs/drill/script.py")


def drill(*arguments: str, cwd: Path = ROOT, **extra: str) -> subprocess.CompletedProcess[str]:
    return run_command([*DRILL, *arguments], cwd, **extra)


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


def test_a_right_script_passes(tmp_path: Path) -> None:
    """Without {out} in its arguments, the drill runs it in new folders."""
    job = example(tmp_path / "job", every=5)
    done = drill("-n", "2", "--only", "sigterm,flip", "--seed", "3", "--json", str(job))
    assert done.returncode == 0, done.stderr + done.stdout
    assert "no argument has {out}, so each run has an empty working folder" in done.stderr
    found = results(done)
    assert [each["codes"] for each in found.values()] == [[0], [75, 0], [1, 0]]
    assert [found[name]["steps_lost"] > 0 for name in ("sigterm", "flip")] == [False, True]
    assert all(found[name]["difference"] == 0.0 for name in ("sigterm", "flip"))
    assert sorted(path.name for path in job.parent.iterdir()) == ["script.py"]


@pytest.mark.slow
def test_every_fault_of_a_right_script() -> None:
    """A plain script keeps one checkpoint without a checksum: it cannot survive damage to that."""
    names = "kill,kill-in-save,sigterm,timeout,full,hang,launcher"
    done = drill("-n", "1", "--only", names, "--seed", "3", "--json", SCRIPT, "{out}")
    assert done.returncode == 0, done.stderr + done.stdout
    assert [name for name, each in results(done).items() if not each["passed"]] == []


def test_a_run_continues_on_another_number_of_ranks() -> None:
    """The script keeps the random numbers of rank 0 alone, which does not matter here."""
    done = drill("-n", "2", "--only", "fewer,more", "--seed", "3", "--json", SCRIPT, "{out}")
    assert done.returncode == 0, done.stderr + done.stdout
    assert [name for name, each in results(done).items() if each["passed"]] == [
        "none",
        "fewer",
        "more",
    ]


TRAIN = "-m mpiddp train --use-syn --arch resnet20 --batch-size 2 --save-every 5 --out {out}"
RIGHT = {
    "mpiddp train": ([*TRAIN.split(), "--epochs", "2", "--steps-per-epoch", "20"], ""),
    "series": ([str(ROOT / "examples/series/many_hosts.py"), "6", "1", "--out", "{out}"], ""),
    "lightning": ([str(ROOT / "tests/jobs/drill/lightning_module.py"), "{out}"], "lightning"),
    "transformers": (
        [str(ROOT / "tests/jobs/transformers_training.py"), "{out}", "24"],
        "transformers",
    ),
    "accelerate": ([str(ROOT / "tests/jobs/drill/accelerated.py"), "{out}"], "accelerate"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_no_false_alarm(name: str) -> None:
    job, package = RIGHT[name]
    env = frameworks.environment(package) if package else {}
    # The Trainer resumes from the newest folder, also if it was killed in the midst of that save.
    names = "kill" if package == "transformers" else "kill,kill-in-save"
    done = drill("-n", "1", "--only", names, "--seed", "3", "--json", *job, **env)
    assert done.returncode == 0, done.stderr + done.stdout


BAD = {
    "nothing to launch. Name a script or a module.": [],
    '"kil" is no fault. Did you mean "kill"?': ["--only", "kil", SCRIPT],
    'it observes a Python script or a module in each rank, and not a command after "--"': ["--", "ls"],
    "--dry-run runs nothing. Leave it out.": ["--dry-run", SCRIPT],
    f"--work {ROOT / 'docs'} is not empty. Name a new folder.": ["--work", "docs", SCRIPT],
    "-n 9 is more than the 2 slots of -H (localhost=2).": ["-n", "9", "-H", "localhost:2", SCRIPT],
}  # fmt: skip


@pytest.mark.parametrize("sentence", BAD)
def test_bad_input(sentence: str) -> None:
    done = drill(*BAD[sentence])
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in done.stderr


SHORT = """
import torch
layer = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
for _ in range(4):
    layer(torch.ones(1, 1)).sum().backward()
    optimizer.step()
"""


def test_a_script_that_is_too_short_and_never_saves(tmp_path: Path) -> None:
    done = drill("-n", "1", "--only", "none", "--steps", "9", script(tmp_path, SHORT))
    assert done.returncode == 0, done.stderr
    assert "the script ends after 4 steps, before --steps 9\n" in done.stderr
    assert "the undisturbed run never called torch.save\n" in done.stderr
