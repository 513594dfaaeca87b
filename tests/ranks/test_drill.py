"""`mpiddp drill` names the defect of a script, and passes one that is right.

python -m pytest tests/ranks/test_drill.py
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import drills, frameworks
from tests.support.drills import DEFECTS, RIGHT, command
from tests.support.errors import error
from tests.support.own_script import example
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT, clean_env, run_command, script

DRILL = (sys.executable, "-m", "mpiddp", "drill")
SCRIPT = str(ROOT / drills.SCRIPT)


def drill(*arguments: str, cwd: Path = ROOT, **extra: str) -> subprocess.CompletedProcess[str]:
    return run_command([*DRILL, *arguments], cwd, **extra)


def results(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode in (0, 1), done.stderr
    return {each["fault"]: each for each in json.loads(done.stdout)}


@pytest.mark.parametrize("defect", DEFECTS)
def test_the_defect_is_named(tmp_path: Path, defect: str) -> None:
    planted = DEFECTS[defect]
    number = ("-n", str(planted.ranks), "--only", planted.fault, "--seed", "3", "--json")
    done = drill(*number, "--work", str(tmp_path / "work"), SCRIPT, "{out}", defect)
    assert done.returncode == 1, done.stderr
    result = results(done)[planted.fault]
    assert not result["passed"]
    assert planted.words in result["cause"]


def test_a_right_script_passes(tmp_path: Path) -> None:
    """Without {out} in its arguments, the drill runs it in new folders."""
    job = example(tmp_path / "job", every=5)
    done = drill("-n", "2", "--only", "sigterm,flip", "--seed", "3", "--json", str(job))
    assert done.returncode == 0, done.stderr + done.stdout
    assert "no argument has {out}, so each run has an empty working folder" in done.stderr
    found = results(done)
    assert [each["codes"] for each in found.values()] == [[0], [75, 0], [1, 0]]
    assert [found[name]["steps_lost"] > 0 for name in ("sigterm", "flip")] == [False, True]
    assert all(found[name]["weights_equal"] for name in ("sigterm", "flip"))
    assert sorted(path.name for path in job.parent.iterdir()) == ["script.py"]


def test_a_run_continues_on_another_number_of_ranks() -> None:
    done = drill("-n", "2", "--only", "fewer,more", "--seed", "3", "--json", SCRIPT, "{out}")
    assert done.returncode == 0, done.stderr + done.stdout
    assert all(each["passed"] for each in results(done).values())


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_no_false_alarm(name: str) -> None:
    right = RIGHT[name]
    env = frameworks.environment(right.package) if right.package else {}
    options = ("-n", "1", "--only", right.faults, "--seed", "3", "--json")
    done = drill(*options, *command(*right.job), **env)
    assert done.returncode == 0, done.stderr + done.stdout
    found = results(done)
    assert [fault for fault, each in found.items() if not each["passed"]] == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], error("to launch")),
        (["--only", "kil", SCRIPT], error("--help", '"kil" ', '"kill"')),
        (["--", "ls"], error("drill: it", "mpiddp drill: ", '"--"')),
        (["--dry-run", SCRIPT], error("drill: --dry-run", "--dry-run ")),
        (["--work", "docs", SCRIPT], error("not empty", f"--work {ROOT / 'docs'} ")),
        (
            ["-n", "9", "-H", "localhost:2", SCRIPT],
            error("slots of", "-n 9 ", " 2 slots", "-H (localhost=2)"),
        ),
    ],
)
def test_bad_input(arguments: list[str], sentence: str) -> None:
    done = drill(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.search(sentence, done.stderr), done.stderr


def test_an_interrupted_drill_names_its_folder(tmp_path: Path) -> None:
    env = clean_env({"TMPDIR": str(tmp_path)})
    command = [*DRILL, "-n", "1", SCRIPT, "{out}"]
    with subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + PATIENCE_S
        while not list(tmp_path.glob("mpiddp-drill-*/undisturbed/first.err")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=PATIENCE_S)
    (folder,) = tmp_path.glob("mpiddp-drill-*")
    assert process.returncode == 130
    assert f"what the runs printed and wrote: {folder}\n" in stderr


SHORT = """
import torch
layer = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
for _ in range(4):
    layer(torch.ones(1, 1)).sum().backward()
    optimizer.step()
"""


def test_a_script_that_lacks_everything(tmp_path: Path) -> None:
    """It takes no folder, is too short, never saves, and begins with other weights each time."""
    only = ("--only", "kill,full", "--steps", "9", "--json")
    done = drill("-n", "1", *only, script(tmp_path, SHORT))
    assert done.returncode == 1, done.stderr
    sentences = (
        "no argument has {out}, so each run has an empty working folder",
        "the script ends after 4 steps, before --steps 9\n",
        "the undisturbed run never called torch.save\n",
        "weights, samples and random numbers not compared: two runs differ from step 0\n",
    )
    assert all(sentence in done.stderr for sentence in sentences), done.stderr
    found = results(done)
    assert found["kill"]["cause"] == "no checkpoint was written within 4 steps: nothing survives"
    assert found["full"]["cause"] == "left out: the script never calls torch.save"
