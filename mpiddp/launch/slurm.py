"""The hosts of a Slurm allocation, for a launch that names none itself.

salloc --nodes 2 --ntasks-per-node 4 mpiddp launch train.py
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from mpiddp.errors import UserError
from mpiddp.hostfile import Host, Hosts


def allocation(env: Mapping[str, str]) -> Hosts | None:
    """The allocation that this shell or sbatch script stands in, None outside of any.

    A host's slots are the tasks that were asked for on it. Without --ntasks or --ntasks-per-node they
    stay open, for what Slurm counts then is cores: one rank per GPU, or one on a CPU host.

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
    slots: list[int | None] = [None] * len(names)
    if "SLURM_NTASKS" in env or "SLURM_NTASKS_PER_NODE" in env:
        slots = [*expand_counts(env.get("SLURM_TASKS_PER_NODE", f"1(x{len(names)})"))]
    elif gpus := env.get("SLURM_GPUS_ON_NODE"):
        slots = [int(gpus)] * len(names)
    if len(slots) != len(names):
        raise UserError(
            f"SLURM_TASKS_PER_NODE={env['SLURM_TASKS_PER_NODE']} does not fit the {len(names)} hosts "
            f"of SLURM_JOB_NODELIST={nodelist}. Name the hosts with --hostfile or -H."
        )
    hosts = (Host(name, slots=count) for name, count in zip(names, slots, strict=True))
    return Hosts(f"Slurm job {job}", tuple(hosts))


def expand_nodelist(nodelist: str) -> list[str]:
    """`gpu[07-09,12],login` → gpu07, gpu08, gpu09, gpu12, login; several brackets multiply."""
    return [
        name
        for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
        for name in _expand_name(part)
    ]


def _expand_name(pattern: str) -> list[str]:
    match = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", pattern)
    if match is None:
        return [pattern]
    head, ranges, tail = match.groups()
    numbers: list[str] = []
    for item in ranges.split(","):
        first, _, last = item.partition("-")
        numbers += [
            str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)
        ]
    return [head + number + rest for number in numbers for rest in _expand_name(tail)]


def expand_counts(counts: str) -> list[int]:
    """`2(x3),1` → 2, 2, 2, 1."""
    expanded: list[int] = []
    for part in counts.split(","):
        count, _, repeat = part.partition("(x")
        expanded += [int(count)] * (int(repeat.rstrip(")")) if repeat else 1)
    return expanded
