"""What the folder of a run tells, whatever state it is in: whole, going on, half written, of another program.

Tests mpiddp/report/{read,tables}.py.
"""

import json
import os
import re
import subprocess
import sys
import time

import pytest

from mpiddp import cli
from mpiddp.report.read import Curve, Failure, read_run
from mpiddp.report.tables import facts, time_lost
from tests.support.run_folders import BEGAN, write_run

ILLEGAL = "RuntimeError: an illegal memory access was encountered"
CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:537] Connection closed by peer [10.0.0.2]:7"


def texts(part: str) -> list[str]:
    """The texts of a part of the page, without markup."""
    return [each for each in re.split(r"<[^>]*>", part) if each.strip()]


@pytest.mark.parametrize("ahead_s", [0, 7200, -259_200])
def test_a_run_with_two_restarts(tmp_path, ahead_s):
    """Neither its length nor its first failure depends on the clock of another host than rank 0's."""
    failures = {3: ILLEGAL, 0: CLOSED, 1: "ValueError: a bug"}
    saves, restarts = [30, 60, 100], [30, 60]
    folder = tmp_path / "a"
    write_run(folder, saves=saves, restarts_at=restarts, num_ranks=4, failures=failures)
    lines = [json.loads(line) for line in (folder / "attempts.jsonl").read_text().splitlines()]
    for line in lines:
        line["at"] += ahead_s * (line.get("rank") == 3)
    (folder / "attempts.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    run = read_run(folder)
    assert (run.name, run.state, run.step, run.notes) == ("a", "done", 100, [])
    assert next(iter(run.saves.items())) == (30, BEGAN + 30)
    assert [start.step for start in run.starts] == [0, 30, 60]
    assert [start.begins - BEGAN for start in run.starts] == [0, 3600, 7200]
    assert [start.outcome for start in run.starts] == ["failed", "failed", "done"]
    # The error of a broken connection is no cause.
    assert [start.failure for start in run.starts] == [ILLEGAL, ILLEGAL, ""]
    assert run.starts[0].failures[0] == Failure(BEGAN + 40 + ahead_s, 3, "gpu001", ILLEGAL)
    # Rank 3 failed 10 s after each save, and rank 0 a second later.
    assert run.seconds == 41 + 71 + 100
    assert texts(time_lost([run]))[6:10] == ["30", "11 s", "59 min", ILLEGAL]
    assert "4 on 2 hosts (gpu000 2, gpu001 2)" in texts(facts([run]))


def test_a_run_goes_on_as_long_as_its_owner_lives(tmp_path):
    folder = write_run(tmp_path / "a", ends=False)
    code = (
        "import sys; from pathlib import Path; from mpiddp.checkpoints.run import RunDir, RunLock; "
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


def test_a_loss_that_became_nan_says_so(tmp_path):
    """Its last finite value was shown."""
    folder = write_run(tmp_path / "a", steps=5)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "train_loss": null}\n{"step": 7, "train_loss": NaN, "lr": 1}\n')
    run = read_run(folder)
    assert run.shown("{:.4g}", "train_loss", "loss") == "nan since step 6"
    assert "nan since step 6" in texts(facts([run]))
    assert run.shown("{:.2g}", "lr") == "1"
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(f'{{"step": {step}, "train_loss": NaN}}\n' for step in range(8, 40_000))
    assert read_run(folder).shown("{:.4g}", "train_loss") == "nan since step 6"
    # `mpiddp runs` reads the end only, and named the first step there.
    assert read_run(folder, only_end=True).shown("{:.4g}", "train_loss") == "nan"


def test_lines_without_a_record_are_counted(tmp_path):
    folder = write_run(tmp_path / "a")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("not json\n[1]\n" + "[" * 100_000 + '\n{"step": "a", "lr": 1}\n{"step": 101, "l')
    run = read_run(folder)
    assert run.notes == [f"{folder}/metrics.jsonl: 4 lines without a record."]
    assert len(run.curves["lr"].steps) == 100


def curve(values: list[float]) -> Curve:
    found = Curve()
    for step, value in enumerate(values):
        found.add(step, value)
    return found


@pytest.mark.parametrize("parts", [1, 7, 100])
def test_a_long_curve_keeps_the_extremes_of_each_part(parts):
    values = [float(each * 7919 % 1009) for each in range(100_000)]
    values[54_321], values[77_777] = 1e9, -1e9
    steps, kept = curve(values).thinned(parts)
    assert len(steps) <= 2 * parts
    assert list(steps) == sorted(set(steps))
    assert (max(kept), min(kept)) == (1e9, -1e9)
    assert all(values[int(step)] == value for step, value in zip(steps, kept, strict=True))


def test_only_the_end_of_long_records_is_read(tmp_path, capsys):
    folder = write_run(tmp_path / "a", steps=10)
    record = json.dumps({"step": 111, "loss": 0.25}).encode() + b"\n"
    size = 1 << 40  # as a file with a hole, which a read from its beginning would not end
    with (folder / "metrics.jsonl").open("r+b") as file:
        file.seek(size)
        file.write(b"\n" + record)
    os.utime(folder / "metrics.jsonl")
    assert cli.main(["runs", str(folder)]) == 0
    assert "111" in capsys.readouterr().out
