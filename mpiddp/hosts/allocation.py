"""The hosts that a scheduler granted, for a launch without --hostfile and -H.

salloc --nodes 2 --ntasks-per-node 4 mpiddp launch train.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from mpiddp.errors import UserError
from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.hosts.slurm_nodelist import expand_counts, expand_nodelist
from mpiddp.text import shown


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
    names = _parsed(env, "SLURM_JOB_NODELIST", nodelist, expand_nodelist)
    counts = f"{env.get('SLURM_GPUS_ON_NODE') or 1}(x{len(names)})"
    counts_name = "SLURM_GPUS_ON_NODE"
    if "SLURM_NTASKS" in env or "SLURM_NTASKS_PER_NODE" in env:
        counts_name = "SLURM_TASKS_PER_NODE"
        counts = env.get(counts_name, f"1(x{len(names)})")
    slots = _parsed(env, counts_name, counts, expand_counts)
    if len(slots) != len(names):
        raise UserError(
            f"{counts_name}={shown(counts)} does not fit the {len(names)} hosts "
            f"of SLURM_JOB_NODELIST={shown(nodelist)}. Name the hosts with --hostfile or -H."
        )
    hosts = (Host(name, slots=count) for name, count in zip(names, slots, strict=True))
    return Allocation(Hosts(f"Slurm job {job}", tuple(hosts)), starter="srun")


_Parsed = TypeVar("_Parsed")


def _parsed(
    env: Mapping[str, str], name: str, text: str, parse: Callable[[str], _Parsed]
) -> _Parsed:
    """`text`, made from the variable `name`, as `parse` reads it."""
    try:
        return parse(text)
    except ValueError as error:
        raise UserError(
            f'{name}="{shown(env.get(name, ""))}" is not Slurm\'s: {error}. '
            "Name the hosts with --hostfile or -H, or unset SLURM_JOB_ID."
        ) from None


# A row for each scheduler: from the environment to its allocation.
ALLOCATIONS: tuple[Callable[[Mapping[str, str]], Allocation | None], ...] = (slurm,)
