"""What `mpiddp runs` shows of a folder, whatever state it is in: going on, stopped, half written."""

import json
import math
import os
import subprocess
import sys
import time

import pytest

from mpiddp import cli
from mpiddp.watch.runs import read_run
from tests.support.run_folders import BEGAN, write_run


@pytest.mark.parametrize("ahead_s", [0, 7200, -259_200])
def test_a_run_with_two_restarts(tmp_path, ahead_s):
    """Its length does not depend on the clock of another host than rank 0's."""
    failures = {3: "RuntimeError: an illegal memory access", 0: "OSError: gone", 1: "ValueError"}
    folder = write_run(tmp_path / "a", restarts_at=[30, 60], failures=failures)
    lines = [json.loads(line) for line in (folder / "attempts.jsonl").read_text().splitlines()]
    for line in lines:
        line["at"] += ahead_s * (line.get("rank") == 3)
    (folder / "attempts.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    run = read_run(folder)
    assert (run.name, run.state, run.step) == ("a", "done", 100)
    # Rank 3 failed 10 s after each save, and rank 0 a second later.
    assert run.seconds == 41 + 71 + 100


def test_a_run_goes_on_as_long_as_its_owner_lives(tmp_path):
    folder = write_run(tmp_path / "a", ends=False)
    code = (
        "import sys; from pathlib import Path; from mpiddp.checkpoints.run_folder import RunDir, RunLock; "
        f"lock = RunLock(RunDir(Path({str(folder)!r}))); print(flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as owner:
        owner.stdout.readline()
        assert read_run(folder).state == "running"
        assert read_run(folder).seconds == pytest.approx(time.time() - BEGAN, abs=100)
        owner.kill()
    assert read_run(folder).state == "failed"  # at once


def test_a_training_that_was_stopped_or_resumed_is_not_done(tmp_path):
    folder = write_run(tmp_path / "a")
    os.utime(folder / "summary.json", times=(BEGAN,) * 2)  # of the start before
    assert read_run(folder).state == "stopped"


def test_a_loss_that_became_nan_is_shown(tmp_path, capsys):
    """Its last finite value was shown."""
    folder = write_run(tmp_path / "a", steps=5, ends=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "train_loss": null}\n{"step": 7, "train_loss": NaN, "lr": 1}\n')
    assert math.isnan(read_run(folder).values["train_loss"])
    assert cli.main(["runs", str(tmp_path)]) == 0
    assert " nan " in capsys.readouterr().out
    assert cli.main(["runs", "--json", str(tmp_path)]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert (run["step"], run["train_loss"]) == (7, None)
