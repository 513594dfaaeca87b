"""The slots of each host, from its line and its GPUs, and then its ranks, within -n and --npernode."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace

from mpiddp.errors import UserError
from mpiddp.hosts.gpus import NO_ANSWER, VISIBLE, gpu_names, hides_all_gpus
from mpiddp.hosts.hostfile import Host, Hosts, slots_of
from mpiddp.hosts.names import is_this_host
from mpiddp.launch import log
from mpiddp.launch.preflight import HostInfo
from mpiddp.launch.starters.command import StarterKind
from mpiddp.launch.variables import env_on_host
from mpiddp.text import counted, listed


def with_slots(
    hosts: Hosts,
    infos: Mapping[Host, HostInfo],
    variables: Mapping[str, str],
    backend: str | None = None,
    *,
    by_number: bool = False,
    dry_run: bool = False,
) -> Hosts:
    """The hosts with known slot counts, but for a host whose GPUs nobody knows.

    Args:
        infos: of the hosts that the preflight has checked.
        variables: those that the user gives the ranks.
        backend: the one that the job requests. "auto" is nccl on GPUs; None is unknown.
        by_number: the user requests a number of ranks, on this machine.
    """
    found, is_gloo = [], backend == "gloo"
    for host in hosts.hosts:
        info, is_here = infos.get(host), is_this_host(host.name)
        is_known = not is_gloo and (info is not None or (is_here and len(hosts.hosts) == 1))
        slots, gpus, most = host.slots, 0, host.max_slots or sys.maxsize
        # The vendor's tool of this machine may take seconds, so it runs only if its answer matters.
        if info or (is_here and (slots is None or host.gpus or (is_known and slots > 1))):
            env = env_on_host(host.name, os.environ, variables)
            gpus = _visible_gpus(host, _gpus_here(host, env) if info is None else info.gpus, env)
        if slots is not None:
            slots = _fitted(hosts, host, slots, gpus, backend) if is_known else slots
        elif by_number:
            slots = min(most, (0 if is_gloo else gpus) or len(os.sched_getaffinity(0)))
        elif info or is_here:
            slots = min(most, gpus or 1)
        elif dry_run:
            slots = 1
            log.info(
                f"{host.name} has no slot count, and a dry run contacts no host: assuming slots=1"
            )
        found.append(replace(host, slots=slots))
    return replace(hosts, hosts=tuple(found))


def _gpus_here(host: Host, env: Mapping[str, str]) -> int:
    """The number of this machine's GPUs. Raises UserError if the vendor's tool does not answer."""
    if hides_all_gpus(env):
        return 0
    names = gpu_names(env.get("PATH"))
    if names is None:
        raise UserError(NO_ANSWER.format(name=host.name))
    return len(names)


def _visible_gpus(host: Host, installed: int | None, env: Mapping[str, str]) -> int:
    """The number of a host's GPUs that its hostfile entry, or else the variables of its ranks, leave visible.

    `installed` is None if the vendor's tool does not answer, which matters only for a job that uses GPUs.
    """
    if hides_all_gpus(env) or installed is None:
        return 0
    if host.gpus is None:
        chosen = [len(env[name].split(",")) for name in VISIBLE if name in env]
        return min([installed, *chosen])
    if missing := [number for number in host.gpus if number >= installed]:
        raise UserError(
            f"{host.name} has {counted(installed, 'GPU')}, so there is no GPU {missing[0]} "
            f"(gpus={','.join(map(str, host.gpus))}). They are numbered from 0."
        )
    return len(host.gpus)


def _fitted(hosts: Hosts, host: Host, slots: int, gpus: int, backend: str | None) -> int:
    """The host's slots as written. A scheduler's, which may be cores, are no more than the GPUs."""
    if not 0 < gpus < slots:
        return slots
    found = f"{host.name} has {counted(gpus, 'GPU')} but {slots} slots"
    if hosts.scheduler:
        log.info(
            f"{found}: starting only {counted(gpus, 'rank')} there; "
            f"-x CUDA_VISIBLE_DEVICES= hides {'it' if gpus == 1 else 'them'} from a script that uses gloo"
        )
        return gpus
    if backend is not None:
        raise UserError(f"{found}: ranks would share GPUs. Write: {host.name} slots={gpus}")
    log.info(f"{found}: ranks that use GPUs would share them, which NCCL refuses")
    return slots


def place(
    hosts: Hosts,
    kind: StarterKind,
    n: int | None = None,
    npernode: int | None = None,
    *,
    may_be_fewer: bool = False,
    max_ranks: int | None = None,
) -> Hosts:
    """The hosts that take ranks, each with its number, under the names that mpirun gets.

    `n` ranks fill the slots (or `npernode`) in order.

    Args:
        hosts: with known slot counts.
        may_be_fewer: hosts are left out, so fewer ranks than `n` may start.
        max_ranks: an upper bound on the number of ranks, beside `n`.
    """
    room = {host: slots_of(hosts, host) for host in hosts.hosts}
    for host, slots in room.items():
        if npernode is not None and npernode > slots > 0:
            raise UserError(
                f"--npernode {npernode} is more than the {slots} slots of {host.name} "
                f"({hosts.where(host)})."
            )
        room[host] = min(slots, npernode or slots)
    total = sum(room.values())
    if n is not None and n > total and not may_be_fewer:
        within = f" with --npernode {npernode}" if npernode else ""
        slots_of_each = listed([f"{host.name}={slots}" for host, slots in room.items()])
        raise UserError(
            f"-n {n} is more than the {total} slots of {hosts.source}{within} ({slots_of_each})."
        )
    left = min(each for each in (total, n, max_ranks) if each is not None)
    placed = []
    for host, slots in room.items():
        if ranks := min(left, slots):
            placed.append(replace(host, ranks=ranks))
        left -= ranks
    found = replace(hosts, hosts=tuple(placed))
    return found if kind.has_scheduler else _named_for_mpirun(found, kind)


def _named_for_mpirun(hosts: Hosts, kind: StarterKind) -> Hosts:
    """This machine under its own name: mpirun recognizes it by that, and does not use ssh to reach it."""
    own = [host for host in hosts.hosts if is_this_host(host.name)]
    if len(own) > 1:
        raise UserError(
            f"{hosts.where(own[1])}: {own[0].name} and {own[1].name} are both this machine. "
            "Merge them into one."
        )
    name = socket.gethostname()
    if kind.cuts_own_name:
        name = name.partition(".")[0]
    named = (
        replace(host, name=name, user=None, port=None) if host in own else host
        for host in hosts.hosts
    )
    return replace(hosts, hosts=tuple(named))


def ranks_by_host(hosts: Hosts) -> list[str]:
    """One line per host with its ranks: "node1: ranks 0-3"."""
    lines, first = [], 0
    for host in hosts.hosts:
        last = first + host.ranks - 1
        lines.append(f"{host.name}: rank{f's {first}-{last}' if host.ranks > 1 else f' {first}'}")
        first = last + 1
    return lines
