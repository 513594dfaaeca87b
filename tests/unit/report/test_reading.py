"""What the folder of a run tells, whatever state it is in: whole, going on, half written, of another program.

Tests mpiddp/report/read.py, rank_files.py, history.py and tables.py.
python -m pytest tests/unit/report/test_reading.py
"""

from __future__ import annotations

import json
import os
import time
from datetime import datetime, timezone
from pathlib import Path

import pytest

from mpiddp.errors import UserError
from mpiddp.report.history import Save
from mpiddp.report.rank_files import Failure
from mpiddp.report.read import read_run
from mpiddp.report.tables import facts
from tests.support.errors import error
from tests.support.ranks import ROOT
from tests.support.run_folders import BEGAN, write_run

ILLEGAL = "RuntimeError: an illegal memory access was encountered"
CLOSED = "RuntimeError: Connection closed by peer"


def test_a_run_with_two_restarts(tmp_path: Path) -> None:
    run = read_run(
        write_run(
            tmp_path / "a",
            steps=100,
            restarts_at=[30, 60],
            saves=[30, 60, 100],
            num_ranks=4,
            epochs=3,
            failures={3: ILLEGAL, 0: CLOSED},
        )
    )
    assert (run.name, run.state, run.step, run.notes) == ("a", "done", 100, [])
    assert run.saves[0] == Save(30, BEGAN + 30)
    assert [start.step for start in run.starts] == [0, 30, 60]
    assert [start.begins - BEGAN for start in run.starts] == [0, 3600, 7200]
    assert [start.outcome for start in run.starts] == ["failed", "failed", "done"]
    # Rank 0 failed a second after rank 3, and each start 10 s after its save.
    assert [start.cause for start in run.starts] == [None, ILLEGAL, ILLEGAL]
    assert [start.repeated_s for start in run.starts] == [None, 11, 11]
    assert [start.idle_s for start in run.starts] == [None, 3600 - 41, 3600 - 71]
    assert run.seconds == 41 + 71 + 101
    assert run.ranks[3].failures[0] == Failure(BEGAN + 40, 3, "gpu001", ILLEGAL)
    assert run.ranks[1].failures == []
    assert [rank.host for rank in run.ranks] == ["gpu000", "gpu000", "gpu001", "gpu001"]
    assert run.ranks[0].attempts[0].versions == "python 3.11.7, torch 2.13.0"
    assert [len(rank.step_times_s) for rank in run.ranks] == [3] * 4
    assert run.shown("{:.2%}", "test_accuracy") == "91.00%"
    assert run.shown("{:.2f}", "nothing", "lr") == "0.00"
    assert run.shown("{:.2f}", "nothing") == "-"


def test_the_times_of_a_log_are_those_of_its_time_zone(tmp_path: Path) -> None:
    """A container may have another one than this host."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rank_00000.log").write_text(
        "2026-11-23 09:30:00,250+0530 started: rank 0 of 1, host a, python 3.11.7, torch 2.13.0\n"
    )
    (start,) = read_run(tmp_path).starts
    assert start.begins == datetime(2026, 11, 23, 4, 0, 0, 250_000, timezone.utc).timestamp()


def test_a_rank_0_that_was_killed_ended_with_the_first_failure(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", failures={1: ILLEGAL}, ends=False)
    run = read_run(folder)
    assert run.state == "failed"
    assert [(start.ends, start.failure) for start in run.starts] == [(BEGAN + 100, ILLEGAL)]


def test_the_error_of_a_broken_connection_is_no_cause(tmp_path: Path) -> None:
    closed = "RuntimeError: [gloo/transport/tcp/pair.cc:537] Connection closed by peer [10.0.0.2]:7"
    killed = read_run(write_run(tmp_path / "a", restarts_at=[50], failures={0: closed}))
    assert killed.ranks[0].failures[0].is_consequence
    assert killed.starts[1].cause == "a rank ended without a word"
    raised = write_run(tmp_path / "b", restarts_at=[50], failures={0: closed, 1: ILLEGAL})
    assert read_run(raised).starts[1].cause == ILLEGAL


def test_ranks_that_were_killed_leave_no_sentence(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", restarts_at=[50], ends=False)
    os.utime(folder / "metrics.jsonl", times=(BEGAN + 3700,) * 2)
    run = read_run(folder)
    assert run.state == "died"
    first, second = run.starts
    assert (first.ends, second.cause, second.repeated_s) == (None, "not known", None)
    assert (second.step, second.ends) == (50, BEGAN + 3700)


def test_a_run_that_goes_on_has_an_owner_that_renews_its_file(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", ends=False)
    owner = folder / "owner.json"
    owner.write_text("{}")
    assert read_run(folder).state == "running"
    assert read_run(folder).seconds == pytest.approx(time.time() - BEGAN, abs=100)
    os.utime(owner, times=(time.time() - 300,) * 2)
    assert read_run(folder).state == "died"


def test_a_run_that_was_stopped_or_resumed_is_not_done(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    os.utime(folder / "summary.json", times=(BEGAN,) * 2)  # of the start before
    assert read_run(folder).state == "stopped"
    (folder / "summary.json").unlink()
    assert read_run(folder).state == "stopped"


def test_the_steps_that_a_restart_repeats_replace_what_was_recorded(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", steps=5)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lr": 7.0}\n')
    lr = read_run(folder).curves["lr"]
    assert list(lr.steps) == [1, 2, 3]
    assert lr.values[-1] == 7.0


def test_any_script_has_curves_and_what_its_ranks_printed(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2, "note": "a", "nan": null}\n')
    (tmp_path / "logs/rank_00001.err").write_text(
        "a warning\n[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "a.py", line 1, in <module>\n[rank1]:     1 / 0\n'
        "[rank1]: ZeroDivisionError: division by zero\n"
    )
    run = read_run(tmp_path)
    assert (run.state, list(run.curves), run.starts) == ("ended", ["loss"], [])
    assert run.ranks[0].failures == [Failure(None, 1, "", "ZeroDivisionError: division by zero")]


@pytest.mark.parametrize(
    ("line", "note"),
    [
        ('{"step": 101, "lr": 0', "the last line, 102, is torn; skipped."),
        ("not json\n", "1 line without a record; skipped. The first is line 102."),
        ("[1]\n{}\n", "2 lines without a record; skipped. The first is line 102."),
        ('{"step": "a", "lr": 1}\n', "1 line without a record; skipped. The first is line 102."),
        ("[" * 100_000 + "\n", "1 line without a record; skipped. The first is line 102."),
    ],
)
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str, note: str) -> None:
    folder = write_run(tmp_path / "a")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line)
    run = read_run(folder)
    assert run.notes == [f"{folder}/metrics.jsonl: {note}"]
    assert len(run.curves["lr"].steps) == 100


@pytest.mark.parametrize("name", ["config.json", "summary.json"])
@pytest.mark.parametrize(
    ("content", "note"),
    [
        ('{"arch": "res', "is not JSON, as if its writing was cut off; left out."),
        ("", "is not JSON, as if its writing was cut off; left out."),
        ("[1, 2]", "is of another program: expected a JSON object; left out."),
    ],
)
def test_a_file_that_is_half_written_is_named(
    tmp_path: Path, name: str, content: str, note: str
) -> None:
    folder = write_run(tmp_path / "a")
    (folder / name).write_text(content)
    assert read_run(folder).notes == [f"{folder / name} {note}"]


def test_values_of_another_program_are_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", steps=3)
    strange = {"step": 4, "a": 10**400, "b": [1], "c": True, "d": {"e": 1}, "lr": 1}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(strange) + "\n" + '{"step": 5, "f": NaN, "g": Infinity}\n')
        file.write(json.dumps({"step": 6, **{f"name{n}": n for n in range(100)}}) + "\n")
    (folder / "logs" / "rank_00000.log").write_bytes(
        b"\xff\0\n9999-99-99 99:99:99,999 started: x\n"
    )
    (folder / "logs" / "rank_99999.log").mkdir()
    (folder / "logs" / "notes.txt").write_text("mine")
    run = read_run(folder)
    assert run.notes == [f"{folder}/metrics.jsonl has more than 40 curves; 65 are left out."]
    assert not set("abcdefg") & set(run.curves)
    assert run.starts == []


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        ({"data": 1.0, "forward": 3.0, "waiting": 0.0}, "data 25%, forward 75%"),
        ({"data": 1.0, "forward": "3", "save": -1.0}, "data 100%"),
        ([1.0], None),
    ],
)
def test_what_the_steps_have_spent_their_time_on(
    tmp_path: Path, phases: object, expected: str | None
) -> None:
    folder = write_run(tmp_path / "a")
    (folder / "summary.json").write_text(json.dumps({"phases": phases}))
    page = facts([read_run(folder)])
    if expected is None:
        assert "time of the steps" not in page
    else:
        assert expected in page


@pytest.mark.parametrize("name", ["fsdp_run", "script", "sharded_script"])
def test_runs_of_an_earlier_version(name: str) -> None:
    run = read_run(ROOT / "tests/data/before_one_form" / name)
    assert (run.state, run.notes) == ("ended", [])
    assert run.saves
    assert run.curves


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=error("exist. Expected", f"{tmp_path}/nothing ")):
        read_run(tmp_path / "nothing")
    no_run = error("has neither", f"{tmp_path} ", "metrics.jsonl", "checkpoints/")
    with pytest.raises(UserError, match=no_run):
        read_run(tmp_path)
