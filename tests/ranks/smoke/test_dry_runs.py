"""Dry runs in the allocation of each scheduler name its hosts, and a launcher never starts silently alone.

Tests mpiddp/hosts/allocations.py, mpiddp/hosts/hostfile.py.
python -m pytest tests/ranks/smoke/test_dry_runs.py
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from mpiddp.launch.starters.table import identify
from tests.support.allocations import DRY_RUNS, PBS, Env, documented_dry_runs, enter_folder
from tests.support.errors import error
from tests.support.mpis import mpirun_of
from tests.support.ranks import launch
from tests.unit.launch.test_starters import MPIS

SCRIPT = "examples/message_passing.py"


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return enter_folder(tmp_path, monkeypatch)


def test_a_dry_run_says_where_the_hosts_come_from() -> None:
    done = launch("--dry-run", SCRIPT, LSB_JOBID="105", LSB_MCPU_HOSTS="n1.invalid 2 n2.invalid 2")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[:3] == [
        "mpiddp: no hosts given: using LSF job 105, slots=4",
        "mpiddp: n1.invalid: ranks 0-1",
        "mpiddp: n2.invalid: ranks 2-3",
    ]
    assert "-H n1.invalid,n1.invalid,n2.invalid,n2.invalid" in done.stdout


OF_HOSTS = (
    *("-n ", "-H ", "-hosts ", "-machinefile ", "-launcher ", "-bootstrap ", "--prtemca "),
    *("--mca prte_keep_fqdn", "--mca plm_rsh_agent", "--ntasks", "--distribution", "--mpi="),
)


@pytest.mark.parametrize("name", DRY_RUNS)
def test_a_dry_run_is_as_documented(in_folder: Path, name: str) -> None:
    mpi, env = DRY_RUNS[name]
    mpirun = mpirun_of(mpi)
    if identify(Path(mpirun), os.environ).kind is MPIS["openmpi4"].kind and mpi == "openmpi5":
        pytest.skip("the page shows Open MPI 5")
    files = {
        each: str(in_folder / value) for each, value in env.items() if (in_folder / value).is_file()
    }
    options = () if mpi == "openmpi5" else ("--mpirun", mpirun)
    done = launch("--dry-run", *options, SCRIPT, **(env | files))
    assert done.returncode == 0, done.stderr
    command, _, explained = done.stdout.partition("\n\n")
    (program,) = {
        Path(word).name for word in command.split() if word.endswith(("/mpirun", "/srun"))
    }
    flags = [line.strip() for line in explained.splitlines() if line.startswith("  -")]
    shown = [program, *(flag for flag in flags if flag.startswith(OF_HOSTS))]
    assert " ".join(shown) == documented_dry_runs()[name]


def test_local_starts_on_this_machine_alone() -> None:
    done = launch("--local", "-n", "2", "--dry-run", SCRIPT, LSB_MCPU_HOSTS="n1.invalid 2 n2 2")
    assert done.returncode == 0, done.stderr
    assert "invalid" not in done.stdout + done.stderr
    assert "-n 2" in done.stdout


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"PBS_JOBID": "12"}, error("not: this", "PBS_JOBID=12 ", "PBS_NODEFILE ")),
        (
            {"RANK": "1", "WORLD_SIZE": "4"},
            error("launch starts", "RANK=1 ", "4 ranks (env://)", "mpiddp run ", "--local"),
        ),
        (
            {"SLURM_JOB_ID": "1", "LSB_MCPU_HOSTS": "n1 1"},
            error("but SLURM_JOB_NODELIST", "SLURM_JOB_ID=1 ", "SLURM_JOB_NODELIST "),
        ),
        # prterun, or a launcher whose variables say no number of ranks
        (
            {"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-n1-7@1"},
            error("launcher has", "PMIX_RANK=1 ", "mpiddp launch"),
        ),
        ({"FLUX_TASK_RANK": "1"}, error("only some", "flux's ", "FLUX_TASK_RANK=1")),
        ({"PALS_RANKID": "1"}, error("only some", "pals's ", "PALS_RANKID=1")),
    ],
)
def test_the_command_never_starts_silently_alone(variables: Env, sentence: str) -> None:
    done = launch(SCRIPT, **variables)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert re.fullmatch(sentence, line), line
    alone = launch("--local", "-n", "1", "--dry-run", SCRIPT, **variables)
    assert alone.returncode == 0, alone.stderr


def test_a_pbs_job_without_ssh_says_what_works_there(in_folder: Path) -> None:
    pbs = PBS | {"PBS_NODEFILE": str(in_folder / "node_file")}
    done = launch(SCRIPT, **pbs, PATH="/nowhere")
    assert (done.returncode, done.stdout) == (2, "")
    commands = ("sudo apt-get install openssh-client", "mpirun python -m mpiddp run …")
    sentence = error("not installed", commands[0], "PBS", commands[1])
    assert re.fullmatch(f"{sentence}\n", done.stderr), done.stderr
