"""An mpirun or srun that does not start its ranks, or does not end: the time that the launcher gives it."""

import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.support.machine import executable
from tests.support.ranks import find_mpirun, run_command, script

# The limits are two minutes and ten seconds.
IMPATIENT = """
import sys
from mpiddp.cli import main
from mpiddp.launch.run import attempt, watchers
exec(sys.argv[1])
sys.exit(main(["launch", *sys.argv[2:]]))
"""
STARTS, ENDS = "watchers.START_TIMEOUT_S = attempt.LOOK_S = 0.01", "attempt.EXIT_S = 0.01"
OPEN_MPI = "if [ $1 = --version ]; then echo 'mpirun (Open MPI) 5.0.11'; else exec sleep 6000; fi"
SLURM = "[ $1 = --version ] && exec echo slurm 22.05.8\nsleep 1; echo srun: denied >&2; exit 1"
# Of its two tasks, the first alone begins.
STARTS_ONE = """[ $1 = --version ] && exec echo slurm 22.05.8
while [ "${1#--}" != "$1" ]; do shift; done
SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_LOCALID=0 exec "$@"
"""
IN_SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "localhost", "SLURM_TASKS_PER_NODE": "2"}


@pytest.fixture
def launch(tmp_path: Path):
    def launch(limit: str, *options: str, **env: str) -> CompletedProcess[str]:
        launcher = (sys.executable, script(tmp_path, IMPATIENT), limit)
        return run_command([*launcher, *options, "--", "true"], **env)

    return launch


def test_no_rank_starts_in_time(launch, tmp_path):
    mpirun = executable(tmp_path / "mpirun", OPEN_MPI)
    done = launch(STARTS, "--mpirun", mpirun, "-H", "localhost:2")
    assert done.returncode == 1
    assert "no rank has started in 0.01 s: mpirun or one of" in done.stderr


def test_a_scheduler_may_let_a_start_wait(launch, tmp_path):
    """Until the first rank has begun, there is no limit."""
    executable(tmp_path / "srun", SLURM)
    done = launch(STARTS, PATH=f"{tmp_path}:/usr/bin:/bin", **IN_SLURM)
    assert done.returncode == 1
    assert "srun: denied" in done.stderr
    assert "no rank has started" not in done.stderr


def test_a_rank_that_a_scheduler_starts_begins_the_limit(tmp_path):
    executable(tmp_path / "srun", STARTS_ONE)
    limit = "watchers.JOIN_TIMEOUT_S = attempt.LOOK_S = 0.01"
    command = [sys.executable, script(tmp_path, IMPATIENT), limit, "--", "sleep", "8"]
    path = f"{tmp_path}:/usr/bin:/bin"
    done = run_command(command, PATH=path, SLURM_NTASKS="2", **IN_SLURM)
    assert done.returncode == 1
    assert "rank 1" in done.stderr
    assert "has not started" in done.stderr


def test_an_mpirun_that_stays_when_all_ranks_have_ended_is_ended(launch, tmp_path):
    stays = f'{find_mpirun()} "$@"; [ $1 = --version ] || exec sleep 6000'
    done = launch(ENDS, "--mpirun", executable(tmp_path / "mpirun", stays), "-H", "localhost:2")
    assert done.returncode == 0, done.stderr
