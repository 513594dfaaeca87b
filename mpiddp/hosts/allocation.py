"""The hosts that a scheduler granted, for a launch without --hostfile and -H.

    salloc --nodes 2 --ntasks-per-node 4 mpiddp launch train.py

docs/allocations.md has the variables of each scheduler, with their sources.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mpiddp.errors import JobFailed, UserError
from mpiddp.hosts import schedulers
from mpiddp.hosts.hostfile import Hosts
from mpiddp.hosts.transport import BLAUNCH, QRSH, SSH, SSH_IN_PBS, Transport
from mpiddp.text import all_of, shown


@dataclass(frozen=True)
class Scheduler:
    """One scheduler as data. It is present if a variable of `proof` has a value.

    `read` returns the hosts of the job, or None if it has no other host. `transport` reaches these hosts.
    `starter` is the scheduler's own program for starting ranks, None for mpirun. With `leads_mpirun`, an
    mpirun follows the scheduler's variables, unless flags forbid it.
    """

    name: str
    proof: tuple[str, ...]
    read: Callable[[Mapping[str, str]], Hosts | None]
    transport: Transport = SSH
    starter: str | None = None
    leads_mpirun: bool = False

    def is_present(self, env: Mapping[str, str]) -> bool:
        return any(env.get(name) for name in self.proof)


# KUBERNETES_SERVICE_HOST is not among the variables: every pod has it, also those that Slurm runs in.
SCHEDULERS = (
    Scheduler("Slurm", ("SLURM_JOB_ID",), schedulers.slurm, starter="srun", leads_mpirun=True),
    Scheduler("PBS", ("PBS_JOBID", "PBS_NODEFILE"), schedulers.pbs, SSH_IN_PBS, leads_mpirun=True),
    Scheduler(
        "LSF",
        ("LSB_JOBID", "LSB_DJOB_HOSTFILE", "LSB_MCPU_HOSTS"),
        schedulers.lsf,
        BLAUNCH,
        leads_mpirun=True,
    ),
    Scheduler(
        "Grid Engine",
        ("PE_HOSTFILE", "SGE_TASK_ID"),
        schedulers.grid_engine,
        QRSH,
        leads_mpirun=True,
    ),
    Scheduler("Flux", ("FLUX_URI",), schedulers.flux, leads_mpirun=True),
    Scheduler("MPIJob", ("K_MPI_JOB_ROLE", *schedulers.MPIJOB_HOSTFILES), schedulers.mpijob),
    Scheduler("SkyPilot", ("SKYPILOT_NODE_IPS",), schedulers.skypilot),
    Scheduler(
        "Azure Batch",
        ("AZ_BATCH_MASTER_NODE", "AZ_BATCH_HOST_LIST", "AZ_BATCH_NODE_LIST"),
        schedulers.azure_batch,
    ),
    Scheduler(
        "Kubeflow",
        ("PET_NNODES",),
        schedulers.unread(
            "a PyTorchJob or TrainJob",
            "PET_NNODES",
            "Start the script with torchrun, or use an MPIJob.",
        ),
    ),
    Scheduler(
        "AWS Batch",
        ("AWS_BATCH_JOB_NUM_NODES",),
        schedulers.unread(
            "AWS Batch", "AWS_BATCH_JOB_NUM_NODES", "Start the script with torchrun on each node."
        ),
    ),
)


@dataclass(frozen=True)
class Allocation:
    """Granted hosts, and the scheduler that granted them."""

    hosts: Hosts
    scheduler: Scheduler

    @property
    def starter(self) -> str | None:
        return self.scheduler.starter

    @property
    def transport(self) -> Transport:
        """The scheduler's own transport, or ssh where it is not installed."""
        own = self.scheduler.transport
        return own if own.is_ssh or own.is_installed else SSH


def find_allocation(env: Mapping[str, str]) -> Allocation | None:
    """The allocation that this process runs in, None outside of any.

    Of two allocations the inner one counts, whose hosts the other one has as well.

    Raises:
        UserError: the variables or files of a scheduler are incomplete; two allocations of different hosts.
        JobFailed: a machine failed.
    """
    present = [scheduler for scheduler in SCHEDULERS if scheduler.is_present(env)]
    if len(present) == 1:
        hosts = present[0].read(env)
        return Allocation(hosts, present[0]) if hosts else None
    found, problems = [], []
    for scheduler in present:
        try:
            if hosts := scheduler.read(env):
                found.append(Allocation(hosts, scheduler))
        except UserError as error:
            problems.append((scheduler, error))
    inner = min(found, key=lambda each: len(each.hosts.hosts), default=None)
    names = _names(inner)
    if not problems and all(names <= _names(other) for other in found):
        return inner
    if not found and len(problems) == 1:
        raise problems[0][1]
    raise UserError(
        _conflict([*(each.scheduler for each in found), *(each for each, _ in problems)], env)
    )


def grants_hosts(env: Mapping[str, str]) -> bool:
    """Whether this process runs in an allocation, also in one that cannot be read. run.sh asks this."""
    try:
        return find_allocation(env) is not None
    except (UserError, JobFailed):
        return True


def leading_schedulers(env: Mapping[str, str]) -> tuple[str, ...]:
    """The names of the schedulers whose variables in `env` an mpirun would follow."""
    present = (each for each in SCHEDULERS if each.leads_mpirun and each.is_present(env))
    return tuple(each.name for each in present)


def _names(allocation: Allocation | None) -> set[str]:
    """The names to compare: "node1" and "node1.cluster" are one host."""
    hosts = allocation.hosts.hosts if allocation else ()
    return {
        host.key if re.fullmatch(r"[0-9.]+|.*:.*", host.key) else host.key.partition(".")[0]
        for host in hosts
    }


def _conflict(present: list[Scheduler], env: Mapping[str, str]) -> str:
    present = sorted(present, key=SCHEDULERS.index)
    named = all_of([f"{each.name} ({_proof(each, env)})" for each in present])
    unset = " ".join(f"-u {name}" for name in present[-1].proof if env.get(name))
    return (
        f"the variables of {len(present)} allocations are set, and not of the same hosts: {named}. "
        f"Unset those of the wrong one, as in: env {unset} mpiddp launch …, or name the hosts with "
        "--hostfile or -H."
    )


def _proof(scheduler: Scheduler, env: Mapping[str, str]) -> str:
    name = next(name for name in scheduler.proof if env.get(name))
    return f"{name}={shown(env[name])}"
