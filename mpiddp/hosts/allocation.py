"""The hosts that a scheduler granted, for a launch without --hostfile and -H.

salloc --nodes 2 --ntasks-per-node 4 mpiddp launch train.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mpiddp.errors import UserError
from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.hosts.slurm_nodelist import expand_counts, expand_nodelist


@dataclass(frozen=True)
class Allocation:
    """Granted hosts. `starter` is the scheduler's own program for starting ranks, None for mpirun."""

    hosts: Hosts
    starter: str | None = None


def find_allocation(env: Mapping[str, str]) -> Allocation | None:
    """The allocation that this process runs in, None outside of any.

    Raises:
        UserError: the variables of a scheduler are incomplete.
    """
    found = (allocation_of(env) for allocation_of in ALLOCATIONS)
    return next((allocation for allocation in found if allocation is not None), None)


def slurm(env: Mapping[str, str]) -> Allocation | None:
    """The Slurm allocation of this shell or sbatch script, None outside of any.

    A host's slots are the tasks that the job requested on it. Without --ntasks or --ntasks-per-node
    they are its GPUs, or 1 on a CPU host: Slurm itself would count cores.

    Raises:
        UserError: Slurm's variables are incomplete.
    """
    job = env.get("SLURM_JOB_ID")
    if job is None:
        return None
    nodelist = env.get("SLURM_JOB_NODELIST")
    if not nodelist:
        raise UserError(
            f"SLURM_JOB_ID={job} is set but SLURM_JOB_NODELIST is not: this is only a part of an "
            "allocation's environment. Name the hosts with --hostfile or -H, or unset SLURM_JOB_ID."
        )
    names = expand_nodelist(nodelist)
    slots = [int(env.get("SLURM_GPUS_ON_NODE") or 1)] * len(names)
    if "SLURM_NTASKS" in env or "SLURM_NTASKS_PER_NODE" in env:
        slots = expand_counts(env.get("SLURM_TASKS_PER_NODE", f"1(x{len(names)})"))
    if len(slots) != len(names):
        raise UserError(
            f"SLURM_TASKS_PER_NODE={env['SLURM_TASKS_PER_NODE']} does not fit the {len(names)} hosts "
            f"of SLURM_JOB_NODELIST={nodelist}. Name the hosts with --hostfile or -H."
        )
    hosts = (Host(name, slots=count) for name, count in zip(names, slots, strict=True))
    return Allocation(Hosts(f"Slurm job {job}", tuple(hosts)), starter="srun")


# A row for each scheduler: from the environment to its allocation.
ALLOCATIONS: tuple[Callable[[Mapping[str, str]], Allocation | None], ...] = (slurm,)
