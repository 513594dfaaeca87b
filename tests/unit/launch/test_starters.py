"""The command that `mpiddp launch` composes for each MPI, and its hosts."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mpiddp.errors import UserError
from mpiddp.hosts.hostfile import Host, Hosts, parse_host_list
from mpiddp.launch.plan.command import Request, Starter
from mpiddp.launch.plan.options import LaunchOptions
from mpiddp.launch.plan.placement import Past, choose, place
from mpiddp.launch.plan.preflight import Checked
from mpiddp.launch.plan.starters import STARTERS

# What their --version prints.
VERSIONS = {
    "openmpi5": "mpirun (Open MPI) 5.0.11",
    "openmpi4": "mpirun (Open MPI) 4.1.8",
    "mpich": "HYDRA build details:\n    Version:      5.0.2",
    "intelmpi": "Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 2026",
    "slurm": "slurm-wlm 22.05.8",
}


def starter_of(answer: str) -> Starter:
    """The starter whose --version prints `answer`."""
    kind = next(each for each in STARTERS if each.version.search(answer))
    return kind._replace(program=Path("/mpi/bin/mpirun"))


MPIS = {name: starter_of(answer) for name, answer in VERSIONS.items()}
JOB = ("/venv/bin/python", "train.py", "--lr", "0.1")


def hosts(*counts: tuple[str, int]) -> Hosts:
    """Hosts with their numbers of ranks."""
    return Hosts("hosts.txt", tuple(Host(name, ranks=ranks) for name, ranks in counts))


ENV = {"PATH": "/bin", "TOKEN": "private-value"}
UNEQUAL = Request(hosts(("node1", 2), ("node0", 1)), JOB, "/home/me", variables=ENV, env=ENV)


def argv_of(mpi: str, request: Request) -> list[str]:
    return MPIS[mpi].compose(request).argv


def follows(argv: list[str], *expected: str) -> bool:
    """Whether argv contains the expected arguments in a row."""
    spans = zip(*(argv[start:] for start in range(len(expected))), strict=False)
    return expected in spans


def test_a_choice_of_the_user_is_kept():
    """The record of command lines has what is chosen without one, in the job of each scheduler."""
    request = UNEQUAL._replace(env={"SLURM_JOB_ID": "7", "PRTE_MCA_plm": "slurm"})
    argv = argv_of("openmpi5", request)
    assert not follows(argv, "plm", "ssh")
    assert follows(argv, "--prtemca", "ras")
    chosen = {"PRTE_MCA_plm_ssh_agent": "rsh", "OMPI_MCA_btl": "self"}
    argv = argv_of("openmpi5", UNEQUAL._replace(env=chosen))
    assert not {"plm_rsh_agent", "btl"} & {*argv}
    argv = argv_of("openmpi5", UNEQUAL._replace(mpi_args=("--mca", "btl", "self")))
    assert follows(argv, "--mca", "btl", "self")
    assert argv.count("btl") == 1
    own = {"HYDRA_LAUNCHER_EXTRA_ARGS": "-v"}
    command = MPIS["mpich"].compose(UNEQUAL._replace(env=own))
    assert command.settings[next(iter(own))] == "mpiddp-ssh -F mpiddp-ssh_config -v"
    command = MPIS["mpich"].compose(UNEQUAL._replace(env={"HYDRA_LAUNCHER_EXEC": "myssh"}))
    assert not {"-launcher-exec", "mpiddp-ssh"} & {*command.argv, *command.files}


def test_each_mpirun_of_open_mpi_5_has_a_folder_of_its_own():
    """Unless the user has chosen one."""
    name = "PRTE_MCA_prte_local_tmpdir_base"
    chosen = UNEQUAL._replace(mpi_args=("--mca", "orte_tmpdir_base", "/big"))
    for mpi, request, scratch, expected in (
        ("openmpi5", UNEQUAL, "/tmp/x", "/tmp/x"),
        ("openmpi5", UNEQUAL, ".", None),
        ("openmpi5", chosen, "/tmp/x", None),
        ("openmpi4", UNEQUAL, "/tmp/x", None),
    ):
        assert MPIS[mpi].compose(request, scratch=scratch).settings.get(name) == expected


@pytest.mark.parametrize(("cpus", "flags"), [("7", ["--cpus-per-task=3"]), ("1", []), ("", [])])
def test_ranks_beyond_the_one_task_of_a_host_share_its_cores(cpus, flags):
    """A script for torchrun asks for no tasks. Slurm then grants the cores of one on each host."""
    request = UNEQUAL._replace(env={"SLURM_CPUS_PER_TASK": cpus})
    assert max(host.ranks for host in request.hosts.hosts) == 2
    argv = argv_of("slurm", request)
    assert [each for each in argv if "cpus-per-task" in each] == flags
    assert "--overcommit" in argv
    asked = request._replace(env={**request.env, "SLURM_NTASKS": "3"})
    assert "--overcommit" not in argv_of("slurm", asked)


def test_tasks_of_slurm_that_are_too_few(capfd):
    hosts = replace(parse_host_list("a.invalid:1,b.invalid:1"), starter="srun")
    env = {"SLURM_GPUS_ON_NODE": "8"}
    for options, more in (
        (LaunchOptions(npernode=8), "To start more: #SBATCH --ntasks-per-node=8"),
        (LaunchOptions(n=7), "To start more: #SBATCH --ntasks=7"),
    ):
        with pytest.raises(UserError, match=more):
            place(hosts, {}, MPIS["mpich"], options, env, Past(hosts), 2)
        hint = "slots=2; for a rank on each GPU: #SBATCH --ntasks-per-node=8\n"
        assert hint in capfd.readouterr().err


def test_the_only_host_of_a_job_is_not_to_be_excluded(capfd):
    for listed, number in (("a.invalid:1,b.invalid:1", 2), ("a.invalid:1", 1)):
        past = Past(parse_host_list(listed), doubts={"a.invalid": "a ended two"})
        choose(past, Checked(), number, number)
        assert ("--exclude a.invalid" in capfd.readouterr().err) is (number > 1)


def test_a_folder_that_has_been_removed(tmp_path: Path) -> None:
    """A command in a folder that somebody has removed says so in one line."""
    line = f"mkdir gone && cd gone && rmdir ../gone && {sys.executable} -m mpiddp launch x.py"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}  # mpiddp is not installed
    done = subprocess.run(["sh", "-c", line], cwd=tmp_path, env=env, capture_output=True, text=True)
    said = "mpiddp: this folder has been removed. Change to another.\n"
    assert (done.returncode, done.stderr) == (2, said)
