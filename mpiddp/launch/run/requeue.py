"""`--requeue`: a batch job of Slurm comes back by itself after a stop that its scheduler has requested.

    sbatch --nodes 2 --wrap 'mpiddp launch --requeue train.py'

Slurm requeues a preempted job only if it still runs at the end of its GraceTime. A job that saves and leaves
in time has to ask for it.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from mpiddp.errors import STOPPED, UserError
from mpiddp.files import replace_file
from mpiddp.hosts.gpus import tool_output
from mpiddp.launch import log
from mpiddp.launch.judge.events import Outcome
from mpiddp.protocol.channel import state_folder
from mpiddp.protocol.variables import REQUEUE
from mpiddp.text import shown

_MOST_UNSAVED = 3  # runs in a row without a new checkpoint: the last of them is not requeued
_ANSWER_S = 20.0  # that scontrol may take: a busy controller is slow


class SlurmJob(NamedTuple):
    """The job of this process, as scontrol shows it."""

    name: str  # for scontrol
    state: str = ""  # "RUNNING"; after scancel, another one
    is_batch: bool = False
    may_be_requeued: bool = False
    is_preempted: bool = False


def job_of(env: Mapping[str, str]) -> SlurmJob | None:
    """This process's job of Slurm. None if it is in none, or if Slurm does not answer."""
    if not env.get("SLURM_JOB_ID"):
        return None
    name = env["SLURM_JOB_ID"]
    # The number of a task may be that of the whole array.
    if array := env.get("SLURM_ARRAY_JOB_ID"):
        name = f"{array}_{env.get('SLURM_ARRAY_TASK_ID', '')}"
    text = _scontrol(env, "--oneliner", "show", "job", name)
    facts = dict(re.findall(r"\b(JobState|BatchFlag|Requeue|StartTime|PreemptTime)=(\S+)", text))
    if "JobState" not in facts:
        return None
    # A job that has come back may still have the time of its last preemption.
    preempted_at, began_at = facts.get("PreemptTime", "None"), facts.get("StartTime", "")
    return SlurmJob(
        name,
        facts["JobState"],
        is_batch=facts.get("BatchFlag") == "1",
        may_be_requeued=facts.get("Requeue") == "1",
        is_preempted=preempted_at[:1].isdigit() and preempted_at >= began_at,
    )


def is_preempted(env: Mapping[str, str]) -> bool:
    """Whether Slurm has told this process's job to leave its nodes to another one."""
    job = job_of(env)
    return job is not None and job.is_preempted


def refuse_elsewhere(env: Mapping[str, str]) -> None:
    """Raise UserError unless this process runs in a batch job of Slurm that may be requeued."""
    source = REQUEUE if env.get(REQUEUE) else "--requeue"
    if not env.get("SLURM_JOB_ID"):
        raise UserError(
            f"{source}: this is no batch job of Slurm, so nothing can requeue it.",
            fix="sbatch with a script of this command, or leave the option out",
        )
    job = job_of(env)
    if job is not None and not job.is_batch:
        raise UserError(
            f"{source}: Slurm job {job.name} has no batch script, so nothing can requeue it.",
            fix="sbatch with a script of this command, or leave the option out",
        )
    if job is not None and not job.may_be_requeued:
        raise UserError(
            f"{source}: Slurm job {job.name} was submitted as one that is never requeued.",
            fix="#SBATCH --requeue",
        )


# --- the rule ---


class Saved(NamedTuple):
    """The newest checkpoint that a run of this job has written, and the number of that run, from 0 on."""

    checkpoint: str = ""
    run: int = -1

    def after(self, run: int, checkpoint: str) -> Saved:
        """This record after a run, which has written this checkpoint, or none ("")."""
        is_new = checkpoint not in ("", self.checkpoint)
        return Saved(checkpoint, run) if is_new else self

    def comes_back_after(self, run: int) -> bool:
        """Whether the job is requeued after this run: not if it and the two before have saved nothing new."""
        return run - self.run < _MOST_UNSAVED


def _note_of(env: Mapping[str, str]) -> Path:
    """The file that keeps the `Saved` of this job until its next run, which may be on another node."""
    name = f"{env.get('SLURM_CLUSTER_NAME', 'slurm')}-{env['SLURM_JOB_ID']}.json"
    return state_folder() / "requeued" / re.sub(r"[^\w.-]", "_", name)


def _read(note: Path) -> Saved:
    with suppress(OSError, ValueError, TypeError):
        facts = json.loads(note.read_bytes())
        return Saved(str(facts["checkpoint"]), int(facts["run"]))
    return Saved()


# --- the end of a run ---


def requeue(env: Mapping[str, str], outcome: Outcome) -> None:
    """Requeue this process's batch job, if a stop on a request of the scheduler has ended its run.

    Slurm then ends this process, so this is its last act.
    """
    job = job_of(env) if outcome.code == STOPPED and not outcome.is_by_person else None
    note = _note_of(env)
    if job is None or job.state != "RUNNING":  # after scancel, it is not
        with suppress(OSError):
            note.unlink(missing_ok=True)
        return
    count = env.get("SLURM_RESTART_COUNT", "")  # of all restarts of the job, also Slurm's own
    run = int(count) if count.isdecimal() else 0
    saved = _read(note).after(run, outcome.new_checkpoint)
    if not saved.comes_back_after(run):
        runs = f"its last {_MOST_UNSAVED} runs have written no new checkpoint"
        log.error(f"Slurm job {job.name} is not requeued, because {runs}.")
        return
    # Without a home folder, the job is requeued twice at most without a checkpoint.
    with suppress(OSError):
        note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(note, json.dumps(saved._asdict()).encode())
    log.info(f"Slurm job {job.name} is requeued, and runs its batch script again.")
    if refusal := _scontrol(env, "requeue", job.name).strip():
        log.error(f"Slurm has not requeued job {job.name}: {shown(refusal)}.")


def _scontrol(env: Mapping[str, str], *arguments: str) -> str:
    """The answer of scontrol, with its errors; "" if there is none."""
    env = {**env, "SLURM_TIME_FORMAT": "standard"}
    return (
        tool_output("scontrol", arguments, env.get("PATH"), _ANSWER_S, env, subprocess.STDOUT) or ""
    )
