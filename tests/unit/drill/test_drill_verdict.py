"""Verdicts about what ranks have recorded, without a rank.

Tests mpiddp/drill/verdict.py, records.py, command.py and main.py.
python -m pytest tests/unit/drill/test_drill_verdict.py
"""

from dataclasses import replace
from pathlib import Path

import pytest

from mpiddp.drill import main
from mpiddp.drill.faults import FAULTS
from mpiddp.drill.records import Attempt, History, Recording, State
from mpiddp.drill.rehearse import Ended, Rehearsal
from mpiddp.drill.verdict import judge
from tests.support.machine import an_mpirun

KILL = FAULTS[0]
SAVE = {"step": 2, "in_handler": False, "path": "/x/a.pt"}


def state(step: int, run: str, samples: list[int] | None = None) -> State:
    """After a step of a run that makes other random choices than one of another name."""
    same = {"optimizer": "", "buffers": "", "rates": [0.1], "samples": samples or [step]}
    return {"weights": f"{step} {run}", "random": f"{step} {run}", **same}


def attempt(first: int, last: int, run: str, resumed: str = "") -> Attempt:
    before = state(first, run) | {"is_of_model": True, "ahead": 1}
    steps = [state(step, resumed or run) for step in range(first + 1, last + 1)]
    return Attempt(before, steps, [SAVE])


def rehearsal(*attempts: Attempt) -> Rehearsal:
    ended = [Ended(1, "")] * (len(attempts) - 1) + [Ended(0, "")]
    return Rehearsal(True, ended, 1.0, Recording([History([*attempts])]))


UNDISTURBED = rehearsal(attempt(0, 4, "a"))


def test_a_script_that_does_not_repeat_itself_is_not_compared():
    """It failed once the time for a second undisturbed run was short."""
    killed = rehearsal(attempt(0, 3, "b"), attempt(2, 4, "b"))
    result = judge(UNDISTURBED, KILL, killed)
    assert (result.passed, result.cause, result.weights_equal) == (True, "", None)
    assert result.differs_from == 0
    assert (result.samples_repeated, result.steps_lost, result.checkpoint_lost) == (None, 1, False)
    _, row, sentence = main.table([result]).splitlines()
    assert row.split() == ["kill", "pass", "-", "-", "no", "-", "0"]
    assert sentence.endswith("are not compared: two runs differ from step 0.")


def test_a_run_that_resumes_from_an_older_save_has_lost_a_checkpoint():
    anew = rehearsal(attempt(0, 3, "a"), attempt(0, 4, "a"))
    result = judge(UNDISTURBED, KILL, anew)
    assert result.checkpoint_lost
    assert result.cause.startswith("the run begins anew, although it had saved at step 2")


@pytest.mark.parametrize(
    ("code", "said", "cause"),
    [
        # torch prints some of its errors in bold.
        (
            1,
            "_pickle.UnpicklingError: Weights only load failed. \x1b[1mdo those steps\x1b[0m",
            "_pickle.UnpicklingError: Weights only load failed. do those steps: save tensors",
        ),
        (
            2,
            "mpiddp: no hosts given: using this machine\nthe checkpoint has other options.\n",
            "the checkpoint has other options.",
        ),
    ],
)
def test_a_resume_that_fails(code, said, cause):
    killed = rehearsal(attempt(0, 3, "a"), attempt(2, 4, "a"))
    failed = replace(killed, ended=[Ended(1, ""), Ended(code, said)])
    found = judge(UNDISTURBED, KILL, failed).cause
    assert found.startswith(f"the resumed run ended with code {code}: {cause}")


def test_files_of_options_are_found_from_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("localhost slots=2", encoding="utf-8")
    for name in (".env", "train.py"):
        Path(name).touch()
    mpirun = an_mpirun(tmp_path)
    given = ["-n", "2", "--hostfile", "hosts", "--env-file=./.env", "-x", "A=hosts", "--grace=9"]
    given += ["--mpirun", "./mpirun"]
    _, command = main._parse(["--steps", "3", *given, "train.py", "--out", "{out}"])
    assert command.options == (
        *("--hostfile", f"{tmp_path}/hosts", "-n", "2", "--mpirun", mpirun, "-xA=hosts"),
        *(f"--env-file={tmp_path}/.env", "--grace", "9.0"),
    )
    assert command.job == (f"{tmp_path}/train.py", "--out", "{out}")
    assert (command.ranks, command.has_hosts) == (2, False)
