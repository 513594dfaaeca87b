"""What the folder of a run tells, whatever state it is in: whole, going on, half written, of another program.

Tests mpiddp/report/{read,tables,curves}.py.
python -m pytest tests/unit/report/test_reading.py
"""

import json
import os
import re
import subprocess
import sys
import time

import pytest

from mpiddp.errors import UserError
from mpiddp.report.curves import Curve, thinned
from mpiddp.report.read import Failure, read_run
from mpiddp.report.tables import compared, facts, time_lost
from tests.support.errors import error
from tests.support.run_folders import BEGAN, write_run

ILLEGAL = "RuntimeError: an illegal memory access was encountered"
CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:537] Connection closed by peer [10.0.0.2]:7"


def texts(part: str) -> list[str]:
    """The texts of a part of the page, without markup."""
    return [each for each in re.split(r"<[^>]*>", part) if each.strip()]


def test_a_run_with_two_restarts(tmp_path):
    failures = {3: ILLEGAL, 0: CLOSED}
    saves, restarts = [30, 60, 100], [30, 60]
    folder = tmp_path / "a"
    run = read_run(
        write_run(folder, saves=saves, restarts_at=restarts, num_ranks=4, failures=failures)
    )
    assert (run.name, run.state, run.step, run.notes) == ("a", "done", 100, [])
    assert next(iter(run.saves.items())) == (30, BEGAN + 30)
    assert [start.step for start in run.starts] == [0, 30, 60]
    assert [start.begins - BEGAN for start in run.starts] == [0, 3600, 7200]
    assert [start.outcome for start in run.starts] == ["failed", "failed", "done"]
    # The error of a broken connection is no cause.
    assert [start.failure for start in run.starts] == [ILLEGAL, ILLEGAL, ""]
    assert run.starts[0].failures[0] == Failure(BEGAN + 40, 3, "gpu001", ILLEGAL)
    # Rank 0 failed a second after rank 3, and each start 10 s after its save.
    assert run.seconds == 41 + 71 + 100
    assert texts(time_lost([run]))[6:10] == ["30", "11 s", "59 min", ILLEGAL]
    assert "4 on 2 hosts (gpu000 2, gpu001 2)" in texts(facts([run]))


@pytest.mark.parametrize(
    ("end", "state"),
    [
        ({"outcome": "done"}, "done"),
        ({"outcome": "stopped"}, "stopped"),
        ({}, "failed"),
        (None, "failed"),
    ],
)
def test_the_run_of_a_script_is_done_failed_or_stopped(tmp_path, end, state):
    """It was "ended", however it had ended."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2, "note": "a"}\n')
    started = {"event": "started", "at": BEGAN, "step": 0, "hosts": ["a"], "versions": "torch 2"}
    lines = (
        [started]
        if end is None
        else [started, {"event": "ended", "at": BEGAN + 5, "rank": 0, **end}]
    )
    (tmp_path / "attempts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    run = read_run(tmp_path)
    assert (run.state, list(run.curves), len(run.starts)) == (state, ["loss"], 1)


def test_a_run_goes_on_as_long_as_its_owner_lives(tmp_path):
    folder = write_run(tmp_path / "a", ends=False)
    code = (
        "import sys; from pathlib import Path; from mpiddp.checkpoints.run import RunDir, RunLock; "
        f"lock = RunLock(RunDir(Path({str(folder)!r}))); print(flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as owner:
        assert owner.stdout is not None
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


def test_lines_without_a_record_are_counted(tmp_path):
    folder = write_run(tmp_path / "a")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("not json\n[1]\n" + "[" * 100_000 + '\n{"step": "a", "lr": 1}\n{"step": 101, "l')
    run = read_run(folder)
    assert run.notes == [f"{folder}/metrics.jsonl: 4 lines without a record."]
    assert len(run.curves["lr"].steps) == 100


@pytest.mark.parametrize("name", ["config.json", "summary.json"])
@pytest.mark.parametrize("content", ['{"arch": "res', "[1, 2]"])
def test_a_file_that_is_half_written_is_named(tmp_path, name, content):
    folder = write_run(tmp_path / "a")
    (folder / name).write_text(content)
    assert read_run(folder).notes == [f"{folder / name} cannot be read as a JSON object; left out."]


def test_values_of_another_program_are_left_out(tmp_path):
    folder = write_run(tmp_path / "a", steps=3)
    strange = {"step": 4, "a": 10**400, "b": [1], "c": True, "d": {"e": 1}, "lr": 1}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(strange) + "\n")
        file.write(json.dumps({"step": 6, **{f"name{n}": n for n in range(100)}}) + "\n")
    (folder / "attempts.jsonl").write_text(
        '{"event": "ended"}\n{"event": "started", "at": "x"}\n[]\n'
    )
    run = read_run(folder)
    assert f"{folder}/metrics.jsonl: at most 40 curves are shown." in run.notes
    assert not set("abcd") & set(run.curves)
    assert run.starts == []


@pytest.mark.parametrize(
    ("ranks", "shown"),
    [
        (
            [
                {"use": 97.0, "memory": 40 << 30, "memory_total": 80 << 30, "temperature": 61},
                {"use": 50.0, "memory": None, "temperature": 88, "slowed": ["HW slowdown"]},
            ],
            "74 % in use, at most 42.9 GB, of 85.9 GB, up to 88 °C, HW slowdown",
        ),
        ([3, {"use": "x", "memory": [], "slowed": 5}], ""),
        ({"rank": 0}, ""),
    ],
)
def test_what_the_gpus_of_a_run_have_done(tmp_path, ranks, shown):
    folder = write_run(tmp_path / "a", steps=3)
    with (folder / "attempts.jsonl").open("a") as file:
        file.write('{"event": "started", "at": 1.0, "step": 0}\n')
        file.write(json.dumps({"event": "gpus", "at": 2.0, "ranks": ranks}) + "\n")
    found = texts(facts([read_run(folder)]))
    assert ("GPUs" in found) is bool(shown)
    assert shown in [*found, ""]


def test_what_is_no_run_is_named(tmp_path):
    with pytest.raises(UserError, match=error("exist. Expected", f"{tmp_path}/nothing ")):
        read_run(tmp_path / "nothing")
    no_run = error("has neither", f"{tmp_path} ", "metrics.jsonl", "checkpoints/")
    with pytest.raises(UserError, match=no_run):
        read_run(tmp_path)


def test_of_several_runs_the_environment_that_differs_is_shown(tmp_path):
    record = {"command": "python -m mpiddp train", "python": "3.11.7", "environment": {"A": "1"}}
    records = (
        {**record, "packages": {"torch": "2.13.0"}, "git_commit": "<1f3a>-dirty"},
        {**record, "packages": {"torch": "2.12.1"}, "git_commit": None},
    )
    runs = []
    for name, each in zip("ab", records, strict=True):
        folder = write_run(tmp_path / name, steps=2)
        (folder / "starts").mkdir()
        (folder / "starts/start_0001.json").write_text(json.dumps(each))
        runs.append(read_run(folder))
    both = [run.start_record for run in runs]
    assert texts(compared("fact", both)) == [
        *("different: 2 facts", "A", "B", "packages torch", "2.13.0", "2.12.1"),
        *("git_commit", "&lt;1f3a&gt;-dirty", "-"),
    ]
    assert {"environment A", "3.11.7"} <= {*texts(compared("fact", both[:1]))}


# --- curves ---


def curve(values: list[float]) -> Curve:
    found = Curve()
    for step, value in enumerate(values):
        found.add(step, value)
    return found


@pytest.mark.parametrize("parts", [1, 7, 100])
def test_a_long_curve_keeps_the_extremes_of_each_part(parts):
    values = [float(each * 7919 % 1009) for each in range(100_000)]
    values[54_321], values[77_777] = 1e9, -1e9
    steps, kept = thinned(curve(values), parts)
    assert len(steps) <= 2 * parts
    assert list(steps) == sorted(set(steps))
    assert (max(kept), min(kept)) == (1e9, -1e9)
    assert all(values[int(step)] == value for step, value in zip(steps, kept, strict=True))


def test_steps_that_come_again_replace_what_they_repeat():
    found = curve([1.0, 2.0, 3.0, 4.0])
    found.add(2, 9.0)
    assert (list(found.steps), list(found.values)) == ([0, 1, 2], [1.0, 2.0, 9.0])
