"""The world of a process from every launcher's variables: set, unset, partly set, in conflict."""

import os
import sys
from collections.abc import Mapping

import pytest

from mpiddp.errors import UserError
from mpiddp.protocol.variables import COMMAND, LAUNCHER, RUN_ID
from mpiddp.runtime import gpu
from mpiddp.runtime.program import command_environment
from mpiddp.runtime.reports import announce
from mpiddp.world import RANK_SOURCES, World, is_rank, leave_launchers, likely_ranks

Env = dict[str, str]


@pytest.mark.parametrize(
    ("cores", "bound", "ranks", "threads"), [(7.5, 64, 2, 3), (64, 8, 2, 8), (2, 2, 4, 1)]
)
def test_a_rank_has_its_share_of_the_cores(cores, bound, ranks, threads, monkeypatch):
    """Of a container's quota too, and at most the cores that it is bound to (docs/differences.md)."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(gpu, "cores_of_group", lambda group: cores)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(bound)))
    world = World.from_env(
        {"RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(ranks)}
    )
    assert (gpu.limit_threads(world), os.environ["OMP_NUM_THREADS"]) == (threads, str(threads))
    assert gpu.limit_threads(world) is None  # now the user decides


def named(names: str, *values: str) -> Env:
    return dict(zip(names.split(), values, strict=True))


def mpi(prefix: str, *values: str) -> Env:
    return named(
        " ".join(f"{prefix}_{n}" for n in ["RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"]), *values
    )


TORCH = named("RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE", "5", "8", "1", "4")
TORCHRUN = TORCH | {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "1"}
# Open MPI's NODE_RANK is the rank within a node, not the rank of the node.
OPEN_MPI = mpi("OMPI_COMM_WORLD", "3", "4", "1", "2") | {"OMPI_COMM_WORLD_NODE_RANK": "1"}
MVAPICH2 = mpi("MV2_COMM_WORLD", "3", "4", "1", "2")
HYDRA = named("PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS", "3", "4", "1", "2")
# From a real srun -N2 --ntasks-per-node=2 for task 3; salloc and sbatch set them for a shell, not a task.
SLURM_JOB = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)"}
SALLOC = SLURM_JOB | {"SLURM_NNODES": "2"}
SBATCH = SLURM_JOB | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
SRUN = SLURM_JOB | {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
PMI2 = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "13"}
# flux-environment(7), "Job environment": the tasks of a job; there is no local size. Flux's PMI plugin
# sets PMI_RANK and PMI_SIZE too.
FLUX = PMI2 | {
    "FLUX_URI": "local:///run/flux/local",
    "FLUX_JOB_SIZE": "4",
    "FLUX_JOB_NNODES": "2",
    "FLUX_TASK_RANK": "3",
    "FLUX_TASK_LOCAL_ID": "1",
}
# Slurm's plugin mpi/cray_shasta, which sets the variables that HPE's PALS sets (src/plugins/mpi/
# cray_shasta/mpi_cray_shasta.c). PALS_SIZE is not one of them.
PALS = named("PMI_RANK PMI_SIZE PMI_LOCAL_RANK PMI_LOCAL_SIZE", "3", "4", "1", "2") | {
    "PALS_APID": "4b2a",
    "PALS_RANKID": "3",
    "PALS_NODEID": "1",
    "PALS_LOCAL_RANKID": "1",
    "PALS_SPOOL_DIR": "/var/run/palsd/4b2a",
}
# Public test programs read these four under jsrun; IBM's own page was not at hand.
JSRUN = mpi("JSM_NAMESPACE", "3", "4", "1", "2") | {"PMIX_RANK": "3", "PMIX_NAMESPACE": "1"}
# PMIx Standard, "PMIx_Init": a launcher gives a client its namespace and rank, and not their number.
PMIX = {"PMIX_RANK": "3", "PMIX_NAMESPACE": "prterun-node0-4242@1", "PMIX_VERSION": "5.0.8"}
# Kubeflow Trainer, "PyTorch Training (PyTorchJob)": the environment of a worker pod.
PYTORCHJOB = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "simple-master-0",
    "MASTER_PORT": "23456",
    "PYTHONUNBUFFERED": "1",
}
STALE_RANK = named("RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE", "0", "1", "0", "1")

ROWS = {
    "torchrun": TORCHRUN,
    "openmpi": OPEN_MPI,
    "mvapich2": MVAPICH2,
    "hydra": HYDRA,
    "jsrun": JSRUN,
    "env://": TORCH,
}
# The local size is not known before the ranks have joined.
WITHOUT_LOCAL_SIZE = {"flux": FLUX, "pals": PALS, "slurm": SRUN}
Identity = tuple[str, int, int, int | None, int | None]
ALONE_BY_SRUN = ("slurm", 0, 1, 0, 1)


def identity(env: Mapping[str, str]) -> Identity:
    """The launcher, rank, world size, local rank and local world size."""
    world = World.from_env(env)
    numbers = (world.rank, world.world_size, world.local_rank, world.local_world_size)
    return (world.launcher.name, *numbers)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        *((ROWS[name], (name, 3, 4, 1, 2)) for name in ("openmpi", "mvapich2", "hydra", "jsrun")),
        *((ROWS[name], (name, 5, 8, 1, 4)) for name in ("torchrun", "env://")),
        *((row, (name, 3, 4, 1, None)) for name, row in WITHOUT_LOCAL_SIZE.items()),
        # A PyTorchJob's pods, and process managers that speak PMI but set no local variables.
        (PYTORCHJOB, ("env://", 3, 4, None, None)),
        (PMI2, ("hydra", 3, 4, None, None)),
        (PMI2 | SALLOC, ("hydra", 3, 4, None, None)),
        # The only rank of a job.
        ({"RANK": "0", "WORLD_SIZE": "1"}, ("env://", 0, 1, 0, 1)),
        (SRUN | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}, ALONE_BY_SRUN),
    ],
)
def test_the_variables_of_a_launcher(env, expected):
    assert identity(env) == expected
    assert likely_ranks(env) == (expected[1], expected[3] or 0)


@pytest.mark.parametrize(
    ("env", "launcher", "rank"),
    [
        (OPEN_MPI | STALE_RANK, "openmpi", 3),
        (HYDRA | STALE_RANK, "hydra", 3),
        (SRUN | STALE_RANK, "slurm", 3),
        (OPEN_MPI | TORCHRUN, "torchrun", 5),  # mpirun … torchrun
        (SRUN | TORCHRUN, "torchrun", 5),  # srun … torchrun
        (SRUN | OPEN_MPI, "openmpi", 3),  # mpirun starts its daemons by srun
        (SRUN | HYDRA, "hydra", 3),  # so does Hydra
        (SRUN | PMI2, "slurm", 3),  # srun --mpi=pmi2 also sets PMI_RANK and PMI_SIZE
        (SALLOC | OPEN_MPI, "openmpi", 3),
        (FLUX | OPEN_MPI, "openmpi", 3),  # flux run … mpirun
        (FLUX | SRUN, "flux", 3),  # srun flux start … flux run
        (FLUX | PALS, "flux", 3),  # flux run -o pmi=cray-pals
        (SRUN | PALS, "slurm", 3),  # srun --mpi=cray_shasta
        (PALS | HYDRA, "hydra", 3),
        (PALS | PMIX, "pals", 3),
        (JSRUN | OPEN_MPI, "openmpi", 3),
    ],
)
def test_the_innermost_launcher_wins(env, launcher, rank):
    assert identity(env)[:2] == (launcher, rank)


@pytest.mark.parametrize("env", [SALLOC, SBATCH, SRUN | {"SLURM_STEP_ID": "4294967290"}])
def test_the_shell_of_an_allocation_is_not_a_task(env):
    """salloc's shell, a batch script, and the interactive step of salloc in newer versions of Slurm."""
    assert identity(env) == ("none", 0, 1, 0, 1)
    assert identity(env | TORCH) == ("env://", 5, 8, 1, 4)


@pytest.mark.parametrize(
    ("env", "ranks"),
    [
        (PMIX, (3, 0)),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "two"}, (3, 1)),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "²"}, (0, 0)),
    ],
)
def test_which_rank_prints_that_its_variables_are_refused(env, ranks):
    """tests/refusals has the sentences."""
    with pytest.raises(UserError):
        World.from_env(env)
    assert likely_ranks(env) == ranks


@pytest.mark.parametrize(
    "launcher", [source for source in RANK_SOURCES if source.mpis], ids=lambda source: source.name
)
def test_no_variable_of_an_mpi_reaches_the_command(launcher):
    kept = {**TORCH, "PATH": "/bin", "TORCHELASTIC_RUN_ID": "a"}
    of_mpi = dict.fromkeys((*launcher.variables, *launcher.proof), "0")
    env = command_environment(of_mpi | kept)
    assert env == {**kept, RUN_ID: "a", COMMAND: "1"}
    world = World.from_env(env)  # its GPU may be the only one that it sees
    assert (world.rank, world.local_rank, world.launcher.hides_gpus) == (5, 1, True)
    assert World.from_env(env | {LAUNCHER: launcher.name}).launcher.name == launcher.name


def test_new_ranks_get_no_variables_of_ranks():
    """Those of the job and a user's settings stay."""
    stay = "OMPI_MCA_btl OMPI_ALLOW_RUN_AS_ROOT PMIX_MCA_gds I_MPI_FABRICS SLURM_JOB_ID SLURM_NTASKS FLUX_URI ROLE_NAMES"
    go = "OMPI_FILE_LOCATION PMIX_RANK PRTE_LAUNCHED HYDI_CONTROL_FD PMI_FD MPI_LOCALNRANKS JSM_X PALS_NODEID"
    go += " TORCHELASTIC_MAX_RESTARTS GROUP_RANK ROLE_NAME SLURM_STEP_NODELIST SLURM_SRUN_COMM_PORT RANK"
    env = dict.fromkeys([*stay.split(), *go.split()], "1")
    leave_launchers(env)
    assert [*env] == stay.split()


@pytest.mark.parametrize("arguments", [["x" * 100_000] * 6, "--resume last", ["a\0"]])
def test_an_announcement_that_is_no_command(arguments):
    with pytest.raises(ValueError, match=r"^mpiddp.announce: "):
        announce(resume_args=arguments)


@pytest.mark.parametrize(
    ("env", "is_one"),
    [
        ({}, False),
        # A batch script of Slurm, PBS and LSF is no rank of theirs.
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, False),
        ({"PBS_JOBID": "7", "PBS_NODEFILE": "/f", "LSB_JOBID": "7"}, False),
        ({"MASTER_ADDR": "node0"}, False),
        (mpi("OMPI_COMM_WORLD", "0", "1", "0", "1"), True),  # mpirun -n 1
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}, True),
        ({"RANK": "0"}, True),  # left over: refused as a rank, and not trained with in silence
        ({"MPIDDP_JOB": "1"}, True),  # of mpiddp launch, whatever its mpirun sets
    ],
)
def test_who_is_a_rank(env, is_one):
    assert is_rank(env) is is_one
