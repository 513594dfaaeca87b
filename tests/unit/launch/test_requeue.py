"""`--requeue`: when a batch job of Slurm comes back. tests/promises/test_stop.py has a real Slurm."""

import pytest

from mpiddp.errors import DONE, FAILED, INTERRUPTED, STOPPED
from mpiddp.launch.judge.events import Announcement, Outcome
from mpiddp.launch.run.requeue import Saved, is_preempted, requeue
from tests.support.machine import tool

# As of Slurm 22.05, where a job of several tasks is the last one's, too.
SHOWN = (
    "JobId={id} JobName=train JobState={state} Reason=None Requeue=1 Restarts=0 BatchFlag=1 "
    "StartTime=2026-12-01T10:36:21 EndTime=2026-12-01T10:37:25 "
    "PreemptEligibleTime=2026-12-01T10:36:21 PreemptTime={preempted}"
)


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """The environment of a batch job, whose scontrol keeps its requests to requeue."""

    def of(state: str = "RUNNING", preempted: str = "None", **env: str) -> dict[str, str]:
        shown = SHOWN.format(id="7", state=state, preempted=preempted)
        asked = f'[ "$1" = requeue ] && echo $2 >>{tmp_path}/requeued || echo "{shown}"'
        path = tool(tmp_path / "bin", "scontrol", f"#!/bin/sh\n{asked}\n")
        return {"SLURM_JOB_ID": "7", "PATH": path, **env}

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return of


def requeued(tmp_path) -> list[str]:
    """The jobs that were requeued since the last call."""
    file = tmp_path / "requeued"
    names = file.read_text().split() if file.exists() else []
    file.unlink(missing_ok=True)
    return names


@pytest.mark.parametrize(
    ("checkpoints", "last"),
    [
        (["", "", ""], 2),
        (["a", "", "", ""], 3),
        (["", "", "a", "", "", "b", "", "", ""], 8),
        # A run that writes the checkpoint with which it has begun makes no progress.
        (["a", "a", "a", "a"], 3),
        (["a", "b", "c", "d"], None),
    ],
)
def test_a_job_does_not_come_back_a_third_time_without_a_new_checkpoint(
    checkpoints, last, slurm, tmp_path, capfd
):
    saved = Saved()
    for run, checkpoint in enumerate(checkpoints):
        saved = saved.after(run, checkpoint)
        assert saved.comes_back_after(run) == (run != last)
        stopped = Outcome(STOPPED, announcement=Announcement(checkpoint=checkpoint))
        requeue(slurm(SLURM_RESTART_COUNT=str(run)), stopped)
        assert requeued(tmp_path) == ([] if run == last else ["7"])
        said = capfd.readouterr().err
        assert ("its last 3 runs have written no new checkpoint" in said) == (run == last)


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        (Outcome(STOPPED, is_by_person=True), "RUNNING"),  # Ctrl-C
        (Outcome(STOPPED), "COMPLETING"),  # scancel
        (Outcome(STOPPED), "CANCELLED"),
        *((Outcome(code), "RUNNING") for code in (DONE, FAILED, INTERRUPTED)),
    ],
)
def test_an_end_after_which_no_job_comes_back(outcome, state, slurm, tmp_path):
    requeue(slurm(state), outcome)
    assert requeued(tmp_path) == []


def test_a_task_of_an_array_comes_back_alone(slurm, tmp_path):
    """The number of the array's last task is that of the whole array."""
    requeue(slurm(SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="3"), Outcome(STOPPED))
    assert requeued(tmp_path) == ["7_3"]


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        ("None", False),
        ("2026-12-01T10:36:25", True),
        ("2026-12-01T09:00:00", False),  # of an earlier run
    ],
)
def test_a_preemption_is_one_of_this_run(at, expected, slurm):
    assert is_preempted(slurm(preempted=at)) == expected
    assert not is_preempted({})
