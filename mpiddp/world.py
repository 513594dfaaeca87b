"""World: this process's rank and the sizes of the job, read from the environment variables of its source.

Every source of ranks, such as an mpirun, srun or torchrun, is one row of a table, with the names of its
variables. If only some of them are set, that is an error, so no process takes itself for rank 0 by mistake.

    mpirun -np 2 python -c 'import mpiddp; print(mpiddp.World.from_env())'
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from typing import NamedTuple

from mpiddp.errors import UserError
from mpiddp.protocol import variables
from mpiddp.text import parse_whole, shown


class RankSource(NamedTuple):
    """A program that starts ranks, as data: the variables that hold a rank's identity.

    It is present if any variable of `proof` is set. Neither a later row nor a stale profile sets these.
    """

    name: str
    proof: tuple[str, ...]
    # The variables of the rank, the world size, the local rank and the local world size. If a source lacks
    # the last ones, the ranks count when they have joined.
    variables: tuple[str, ...]
    mpis: tuple[str, ...] = ()  # its ranks may load these, as get_vendor() of mpi4py names them
    hides_gpus: bool = False  # each rank may see only its own GPU
    starts_any_program: bool = False  # its ranks need no MPI, if MASTER_ADDR and _PORT are set
    sets: tuple[str, ...] = ()  # the beginnings of the names of all that it sets for its ranks
    of_a_rank: str = (
        "$"  # a pattern of those that make a process one of its ranks, and are no user's settings
    )


def _mpi(name: str, prefix: str, *mpis: str) -> RankSource:
    """The row of an MPI whose variables have the usual names."""
    names = tuple(f"{prefix}_{end}" for end in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    return RankSource(name, names, names, mpis, of_a_rank=f"{prefix}_")


TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_PMI = ("PMI_RANK", "PMI_SIZE")
_HYDRA = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_PMIX = RankSource("PMIx", ("PMIX_RANK", "PMIX_NAMESPACE"), ("PMIX_RANK",), sets=("PMIX_",))
_MPICHS = ("MPICH", "Intel MPI")
_SET_BY_OPEN_MPI = ("OMPI_", "OPAL_", "ORTE_", "PRTE_", "PMIX_")
_OF_OPEN_MPI = "OMPI_(?!MCA_|ALLOW_)|PMIX_(?!MCA_)|PRTE_(?!MCA_)"
_OF_TORCHRUN = "TORCHELASTIC_|ROLE_NAME$|(GROUP|ROLE)_(RANK|WORLD_SIZE)$"
# The last line is Intel's, and a setting of mpiddp itself. HYDRA_FULL_ERROR is of a library called Hydra.
_SET_BY_HYDRA = (
    *("PMI_", "HYDI_", *_HYDRA, "I_MPI_", "MPIR_CVAR_"),
    *("HYDRA_BSTRAP_", "HYDRA_IP_VERSION", "HYDRA_LAUNCH_TYPE", "HYDRA_LAUNCHER_"),
)

# The innermost source wins, so the order matters: `mpirun … torchrun` is torchrun's job, and the
# mpirun that started this process takes precedence over a RANK left over in a shell profile.
RANK_SOURCES = (
    RankSource("torchrun", ("TORCHELASTIC_RUN_ID",), TORCH, of_a_rank=_OF_TORCHRUN),
    _mpi("openmpi", "OMPI_COMM_WORLD", "Open MPI")._replace(
        sets=_SET_BY_OPEN_MPI, of_a_rank=_OF_OPEN_MPI
    ),
    _mpi("mvapich2", "MV2_COMM_WORLD", "MVAPICH")._replace(sets=("MV2_COMM_WORLD_", "PMI_")),
    RankSource(
        "hydra", _HYDRA, (*_PMI, *_HYDRA), _MPICHS, sets=_SET_BY_HYDRA, of_a_rank="PMI_|HYDI_"
    ),
    # IBM Spectrum MPI is an Open MPI.
    _mpi("jsrun", "JSM_NAMESPACE", "Open MPI")._replace(
        hides_gpus=True, starts_any_program=True, sets=("JSM_", *_SET_BY_OPEN_MPI), of_a_rank="JSM_"
    ),
    # The shells of flux alloc and flux batch have FLUX_URI only, and a Flux that srun has started
    # hides Slurm's variables from them.
    RankSource(
        "flux",
        ("FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID"),
        ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
        ("Open MPI", "MPICH", "Cray MPICH", "Intel MPI", "MVAPICH"),
        hides_gpus=True,
        starts_any_program=True,
        sets=("FLUX_TASK_", "PMI_", "PMIX_"),
    ),
    # The shell of an salloc and an sbatch script have SLURM_NTASKS too, but only a job step has ranks.
    RankSource(
        "slurm",
        ("SLURM_STEP_ID",),
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
        hides_gpus=True,
        sets=("PMI_", "PMIX_"),
        of_a_rank="SLURM_(STEP|PROCID|LOCALID|NODEID|TASK_|GTIDS|SRUN_)",
    ),
    # Slurm's and Flux's plugins for Cray MPICH set the same variables, so both come first.
    RankSource(
        "pals",
        ("PALS_RANKID", "PALS_LOCAL_RANKID"),
        ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID"),
        ("MPICH", "Cray MPICH", "Open MPI"),
        starts_any_program=True,
        sets=("PALS_", "PMI_"),
        of_a_rank="PALS_",
    ),
    # A Hydra that sets no local variables. The sources before it set these two as well.
    RankSource("hydra", _PMI, _PMI, _MPICHS, sets=_SET_BY_HYDRA),
    # A script within a command of a rank finds these alone, and its GPU may be the only visible one, if the
    # rank's source shows each rank its own.
    RankSource("env://", TORCH[2:], TORCH, hides_gpus=True),
    RankSource("env://", TORCH[:2], TORCH[:2], hides_gpus=True),  # the pods of a PyTorchJob
    _PMIX,
)

_OF_A_RANK = re.compile("|".join(source.of_a_rank for source in RANK_SOURCES))
ALONE = RankSource("none", (), ())


class World(NamedTuple):
    """This process's identity in the job.

    `mpiddp.init` and `mpiddp.process_group` return a World with all of its fields set. `World.from_env`
    returns None in the fields that are known once the ranks have joined.

    Attributes:
        rank: of this process, in [0, world_size).
        world_size: number of ranks in the job.
        local_rank: of this process among the ranks of its host, in [0, local_world_size).
        local_world_size: number of ranks on this host. Some launchers set neither of the two; then the
            ranks count them when they join.
        launcher: what has started this process. `launcher.name` is "openmpi", "slurm" or another name of
            `mpiddp.world.RANK_SOURCES`, "none" without a launcher.
        hostname: this host's own name.
        node_rank: of this host, in [0, num_nodes), in the order of the hosts' lowest ranks.
        num_nodes: number of hosts.
        master_addr: the address of rank 0's store.
        master_port: its port.
        backend: of the process group: "nccl", "gloo" or another backend of torch.
        device: torch's name of this rank's device, such as "cuda:1" or "cpu".
    """

    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    launcher: RankSource = ALONE
    hostname: str = socket.gethostname()
    node_rank: int | None = None
    num_nodes: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    backend: str | None = None
    device: str | None = None

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> World:
        """The world of the innermost launcher that has started this process.

        Without any launcher this is rank 0 of 1, with `launcher.name == "none"`. It communicates with no
        other process.

        Args:
            env: the environment variables, by default os.environ.

        Raises:
            UserError: a launcher's variables are only partly set, are not whole numbers, contradict
                each other, or do not include the number of ranks.
        """
        env = os.environ if env is None else env
        source = next((row for row in RANK_SOURCES if _present(row, env)), None)
        if source is None:
            return cls(rank=0, world_size=1, local_rank=0, local_world_size=1)
        if source is _PMIX:
            name = next(proof for proof in source.proof if proof in env)
            raise UserError(
                f"{name}={shown(env[name])} is set: a launcher has started this process as one of "
                "several, but PMIx alone does not say of how many.",
                fix="start the job with mpiddp launch, mpirun, or srun --mpi=none, or unset "
                f"{' and '.join(source.proof)}",
            )
        values = {name: env[name] for name in source.variables if name in env}
        if missing := [name for name in source.variables if name not in values]:
            raise UserError(
                f"only some of {source.name}'s variables are set: found "
                f"{_listed(values) or source.proof[0]}, missing {', '.join(missing)}.",
                fix="start the job with mpirun, torchrun or srun, or unset these variables",
            )
        try:
            rank, world_size, *local = map(parse_whole, values.values())
        except ValueError as error:
            raise UserError(f"{_listed(values)}: each must be {error}.") from None
        alone: list[int | None] = [0, 1] if world_size == 1 else [None, None]
        local_rank, local_size = local + alone[len(local) :]
        most = world_size if local_size is None else local_size
        if not (rank < world_size and (local_rank or 0) < most <= world_size):
            sentence = f"{_listed(values)}: these variables do not come from one launcher."
            raise UserError(sentence, fix="unset the stale ones")
        if source.name == "env://" and is_joined(env):  # its agent has left out the other variables
            named = (row for row in RANK_SOURCES if row.name == env.get(variables.LAUNCHER))
            source = next(named, source)
        return cls(rank, world_size, local_rank, local_size, source)


def set_by_launchers(env: Mapping[str, str]) -> tuple[str, ...]:
    """The beginnings of the names that the launchers of this rank set, the enclosing ones among them."""
    return tuple(name for source in RANK_SOURCES if _present(source, env) for name in source.sets)


def is_rank(env: Mapping[str, str]) -> bool:
    """Whether a launcher has started this process as a rank, or a stale variable says so."""
    # Whatever its mpirun sets, mpiddp launch sets JOB.
    return variables.JOB in env or any(_present(source, env) for source in RANK_SOURCES)


def _listed(values: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={shown(text)}" for name, text in values.items())


def likely_ranks(env: Mapping[str, str]) -> tuple[int, int]:
    """Rank and local rank by the launcher's variables, unchecked; 0 where they are not known.

    They decide which of several ranks prints an error, where `World.from_env` may have failed.
    """
    for source in (row for row in RANK_SOURCES if _present(row, env)):
        with suppress(ValueError):  # a stale variable, beside those of the launcher
            rank, _, local_rank, *_ = (*source.variables, "", "")
            return parse_whole(env.get(rank, "")), parse_whole(env.get(local_rank, "0"))
    return 0, 0


def _present(launcher: RankSource, env: Mapping[str, str]) -> bool:
    if launcher.name == "slurm" and "SLURM_STEP_ID" in env:
        # The shell of salloc may be a step too, whose id is near 2**32. It has no ranks.
        with suppress(ValueError):
            return parse_whole(env["SLURM_STEP_ID"], high=2**32) <= 2**32 - 16
    if launcher.name == "torchrun" and is_joined(env):
        return False
    # --mpi-variables sets all of `proof`, and there is no mpirun.
    if launcher.name == "openmpi" and is_joined(env):
        return "OMPI_COMM_WORLD_NODE_RANK" in env
    return any(name in env for name in launcher.proof)


def is_joined(env: Mapping[str, str]) -> bool:
    """Whether `env` is of a rank that has joined, or of its child. A torchrun sets another id."""
    return variables.RUN_ID in env and env.get("TORCHELASTIC_RUN_ID") == env[variables.RUN_ID]


def leave_enclosing_job(env: MutableMapping[str, str]) -> bool:
    """Remove the variables of another job, before new ranks inherit them. Returns whether it had joined."""
    channel = (variables.CHANNEL, variables.CHANNEL_SECRET)
    for name in (
        *channel,
        variables.ANNOUNCED,
        variables.GPUS,
        variables.LAUNCHER,
        variables.COMMAND,
        variables.RUN_DIR,
    ):
        env.pop(name, None)
    was_joined = is_joined(env)
    if was_joined:
        leave_launchers(env)
        del env[variables.RUN_ID]
        limits = (variables.LOST_AFTER, variables.MAX_RESTARTS, variables.TIMEOUT)
        for name in (variables.PLACEMENT, variables.NETWORKS, variables.RESTART_COUNT):
            env.pop(name, None)
        for name in (variables.INTERFACE, variables.LOG_DIR, variables.REQUEUE, *limits):
            env.pop(name, None)  # they would be options of the new job
    # A launcher sets all of these, or the first two. Fewer are left over in a shell.
    complete = next((names for names in (TORCH, TORCH[:2]) if {*names} <= env.keys()), ())
    for name in {*TORCH} - {*complete}:
        env.pop(name, None)
    if not complete:  # then the id of a torchrun is left over as well
        env.pop("TORCHELASTIC_RUN_ID", None)
    return was_joined


def is_started_by_an_mpi(env: Mapping[str, str]) -> bool:
    """Whether an mpirun has started this process. The program of a rank that has joined finds none of an outer one."""
    return any(source.mpis and _present(source, env) for source in RANK_SOURCES)


def enter_inner_job(env: MutableMapping[str, str]) -> None:
    """Remove the variables of the job around an mpirun, which a rank has started, and keep those of that mpirun."""
    present = (row for row in RANK_SOURCES if row.mpis and _present(row, env))
    sets = tuple(name for row in present for name in row.sets)
    of_mpirun = {name: env[name] for name in env if name.startswith(sets)}
    leave_enclosing_job(env)
    env.update(of_mpirun)


def leave_launchers(env: MutableMapping[str, str]) -> None:
    """Remove the variables that make this process a rank, because new ranks get their own.

    The address of a store stays if a user has set it, but not if torchrun has.
    """
    names = {name for source in RANK_SOURCES for name in (*source.proof, *source.variables)}
    names -= {"SLURM_NTASKS"}  # it belongs to the whole Slurm job, too
    if "TORCHELASTIC_RUN_ID" in env:
        names |= {"MASTER_ADDR", "MASTER_PORT"}
    for name in [name for name in env if name in names or _OF_A_RANK.match(name)]:
        del env[name]
