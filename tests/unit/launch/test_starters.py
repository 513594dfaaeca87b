"""The folder of an mpirun, and the hosts of a job.

tests/promises/test_variables.py has the command for each MPI.
"""

import shlex
from dataclasses import replace
from operator import attrgetter

import pytest

from mpiddp.hosts.allocations import SCHEDULERS
from mpiddp.hosts.hostfile import Host, Hosts, parse_host_list
from mpiddp.launch.plan.command import Request
from mpiddp.launch.plan.environment import Environment
from mpiddp.launch.plan.placement import Past, choose
from mpiddp.launch.plan.preflight import Checked
from mpiddp.launch.plan.starters import STARTERS

OPEN_MPI_4, OPEN_MPI_5, INTEL, MPICH, SRUN = STARTERS
REQUEST = Request(Hosts("hosts.txt", (Host("node1", ranks=2), Host("node0", ranks=1))), ("x",), "/")
NAME = attrgetter("name")
CHOSEN = REQUEST._replace(mpi_args=("--mca", "orte_tmpdir_base", "/big"))


@pytest.mark.parametrize(
    ("starter", "request_", "scratch", "folder"),
    [
        (OPEN_MPI_5, REQUEST, "/tmp/x", "/tmp/x"),
        (OPEN_MPI_5, REQUEST, ".", None),
        (OPEN_MPI_5, CHOSEN, "/tmp/x", None),
        (OPEN_MPI_4, REQUEST, "/tmp/x", None),
    ],
    ids=["5", "a dry run", "the user's", "4"],
)
def test_each_mpirun_of_open_mpi_5_has_a_folder_of_its_own(starter, request_, scratch, folder):
    command = starter.compose(request_, scratch=scratch)
    assert command.settings.get("PRTE_MCA_prte_local_tmpdir_base") == folder


def test_a_launcher_of_the_user_is_kept():
    command = MPICH.compose(
        REQUEST._replace(environment=Environment({"HYDRA_LAUNCHER_EXEC": "myssh"}))
    )
    assert not {"-launcher-exec", "mpiddp-ssh"} & {*command.argv, *command.files}


@pytest.mark.parametrize(
    "transport", [row.transport for row in SCHEDULERS if not row.transport.is_ssh], ids=NAME
)
@pytest.mark.parametrize("starter", [OPEN_MPI_4, OPEN_MPI_5, MPICH, INTEL], ids=NAME)
def test_every_mpirun_is_told_how_a_scheduler_reaches_its_hosts(starter, transport):
    """Whether Open MPI has a component for the scheduler, or not."""
    command = starter.compose(REQUEST._replace(hosts=replace(REQUEST.hosts, transport=transport)))
    written = shlex.join(
        [*command.argv, *command.settings.values(), *map(str, command.files.values())]
    )
    assert transport.agent[0] in written or transport.hydra in command.argv


@pytest.mark.parametrize(("cpus", "flags"), [("7", ["--cpus-per-task=3"]), ("1", []), ("", [])])
def test_ranks_beyond_the_one_task_of_a_host_share_its_cores(cpus, flags):
    command = SRUN.compose(REQUEST._replace(environment=Environment({"SLURM_CPUS_PER_TASK": cpus})))
    assert [argument for argument in command.argv if "cpus-per-task" in argument] == flags


def test_the_only_host_of_a_job_is_not_to_be_excluded(capfd):
    for listed, number in (("a.invalid:1,b.invalid:1", 2), ("a.invalid:1", 1)):
        past = Past(parse_host_list(listed), doubts={"a.invalid": "a ended two"})
        choose(past, Checked(), number, number)
        assert ("--exclude a.invalid" in capfd.readouterr().err) is (number > 1)
