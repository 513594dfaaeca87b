"""The slots of each host, from its line and its GPUs, and then its ranks, within -n and --npernode."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from mpiddp.errors import UserError
from mpiddp.hosts.gpus import (
    NO_ANSWER,
    VISIBLE,
    gpu_names,
    hides_all_gpus,
)
from mpiddp.hosts.hostfile import Host, Hosts, slots_of
from mpiddp.hosts.names import is_this_host
from mpiddp.launch import log
from mpiddp.launch.options import LaunchOptions
from mpiddp.launch.starters.command import StarterKind
from mpiddp.launch.variables import env_on_host
from mpiddp.text import counted, listed

if TYPE_CHECKING:
    from mpiddp.launch.preflight import HostInfo


def with_slots(hosts: Hosts, infos: Mapping[Host, HostInfo], options: LaunchOptions) -> Hosts:
    """The hosts with known slot counts. Logs those that the user may not expect.

    A host without a count gets one slot per GPU, or 1 without GPUs.

    Args:
        infos: of the hosts that the preflight has checked.
    """
    is_default = options.host_list == "localhost" or not (options.names_hosts or hosts.scheduler)
    notes: list[str] = []
    counted_hosts = []
    for host in hosts.hosts:
        is_here = is_this_host(host.name)
        is_compared = options.backend != "gloo" and (
            host in infos or (is_here and len(hosts.hosts) == 1)
        )
        gpus = 0
        # The vendor's tool of this machine may take seconds, so it runs only if its answer matters.
        matters = host.slots is None or host.gpus or (is_compared and host.slots > 1)
        if host in infos or (is_here and matters):
            env = env_on_host(host.name, os.environ, options.variables)
            gpus = _usable(host, infos[host].gpus if host in infos else _gpus_here(host, env), env)
        if host.slots is not None:
            slots = (
                _fitted(hosts, host, gpus, options.backend, notes) if is_compared else host.slots
            )
        elif is_default and options.names_ranks:  # the user requests a number
            slots = (0 if options.backend == "gloo" else gpus) or len(os.sched_getaffinity(0))
        elif host in infos or is_here:
            slots = gpus or 1
        else:
            slots = _unknown_slots(hosts, host, options.dry_run)
        if host.slots is None:
            slots = min(slots, host.max_slots or sys.maxsize)
        counted_hosts.append(replace(host, slots=slots))
    found = replace(hosts, hosts=tuple(counted_hosts))
    if not options.names_hosts:
        log.info(f"no hosts given: using {hosts.source}, slots={found.total_slots}")
    for note in notes:
        log.info(note)
    return found


def _gpus_here(host: Host, env: Mapping[str, str]) -> int:
    """The number of this machine's GPUs. Raises UserError if the vendor's tool does not answer."""
    if hides_all_gpus(env):
        return 0
    names = gpu_names(env.get("PATH"))
    if names is None:
        raise UserError(NO_ANSWER.format(name=host.name))
    return len(names)


def _unknown_slots(hosts: Hosts, host: Host, dry_run: bool) -> int:
    if not dry_run:
        raise UserError(
            f"{hosts.where(host)}: {host.name} has no slot count, and without the preflight its GPUs are "
            f"not counted. Write: {host.name} slots=N"
        )
    log.info(f"{host.name} has no slot count, and a dry run contacts no host: assuming slots=1")
    return 1


def _usable(host: Host, installed: int | None, env: Mapping[str, str]) -> int:
    """The number of a host's GPUs that its hostfile entry, or else the variables of its ranks, leave visible.

    Args:
        installed: None if the vendor's tool does not answer, which matters only for a job that uses GPUs.
    """
    if hides_all_gpus(env) or installed is None:
        return 0
    if host.gpus is not None:
        if missing := [number for number in host.gpus if number >= installed]:
            raise UserError(
                f"{host.name} has {counted(installed, 'GPU')}, so there is no GPU {missing[0]} "
                f"(gpus={','.join(map(str, host.gpus))}). They are numbered from 0."
            )
        return len(host.gpus)
    chosen = [len(env[name].split(",")) for name in VISIBLE if name in env]
    return min([installed, *chosen])


def _fitted(hosts: Hosts, host: Host, gpus: int, backend: str | None, notes: list[str]) -> int:
    """The host's slots as written. A scheduler's, which may be cores, are no more than the GPUs.

    Args:
        backend: the one that the job requests. "auto" is nccl on GPUs; None is unknown.
    """
    assert host.slots is not None
    if not 0 < gpus < host.slots:
        return host.slots
    found = f"{host.name} has {counted(gpus, 'GPU')} but {host.slots} slots"
    if hosts.scheduler:
        notes.append(
            f"{found}: starting only {counted(gpus, 'rank')} there; "
            f"-x CUDA_VISIBLE_DEVICES= hides {'it' if gpus == 1 else 'them'} from a script that uses gloo"
        )
        return gpus
    if backend is not None:
        raise UserError(f"{found}: ranks would share GPUs. Write: {host.name} slots={gpus}")
    notes.append(f"{found}: ranks that use GPUs would share them, which NCCL refuses")
    return host.slots


def place(
    hosts: Hosts,
    options: LaunchOptions,
    kind: StarterKind,
    *,
    max_ranks: int | None = None,
    may_be_fewer: bool = False,
) -> Hosts:
    """The hosts that take ranks, each with its number, under the names that mpirun gets.

    Args:
        hosts: with known slot counts.
        max_ranks: an upper bound on the number of ranks, beside the options.
        may_be_fewer: hosts are left out, so fewer ranks than `-n` may start.
    """
    n = options.n
    if may_be_fewer and n is not None:
        n = min(n, ranks_per_host(hosts, None, options.npernode).world_size)
    placed = ranks_per_host(hosts, n, options.npernode)
    if max_ranks is not None and placed.world_size > max_ranks:
        placed = ranks_per_host(hosts, max_ranks, options.npernode)
    return placed if kind.has_scheduler else _named_for_mpirun(placed, kind)


def ranks_per_host(hosts: Hosts, n: int | None, npernode: int | None) -> Hosts:
    """The hosts with their numbers of ranks: `n` ranks fill the slots (or `npernode`) in order.

    Hosts without a rank are left out.
    """
    _check_ranks(hosts, n, npernode)
    left = hosts.total_slots if n is None else n
    placed = []
    for host in hosts.hosts:
        room = slots_of(hosts, host)
        ranks = min(left, room if npernode is None else min(npernode, room))
        if ranks:
            placed.append(replace(host, ranks=ranks))
        left -= ranks
    return replace(hosts, hosts=tuple(placed))


def _check_ranks(hosts: Hosts, n: int | None, npernode: int | None) -> None:
    """Raise UserError if the hosts have too few slots for `n` ranks, or for `npernode` on each host."""
    usable = [host for host in hosts.hosts if slots_of(hosts, host) > 0]
    if npernode is not None:
        for host in usable:
            if npernode > slots_of(hosts, host):
                raise UserError(
                    f"--npernode {npernode} is more than the {host.slots} slots of {host.name} "
                    f"({hosts.where(host)})."
                )
        if n is not None and n > npernode * len(usable):
            raise UserError(
                f"-n {n} is more than --npernode {npernode} allows on the "
                f"{counted(len(usable), 'host')} of {hosts.source}: "
                f"{counted(npernode * len(usable), 'rank')}."
            )
    if n is not None and n > hosts.total_slots:
        raise UserError(
            f"-n {n} is more than the {hosts.total_slots} slots of {hosts.source} "
            f"({listed([f'{host.name}={host.slots}' for host in hosts.hosts])})."
        )


def ranks_by_host(hosts: Hosts) -> list[str]:
    """One line per host with its ranks: "node1: ranks 0-3"."""
    lines, first = [], 0
    for host in hosts.hosts:
        last = first + host.ranks - 1
        lines.append(
            f"{host.name}: " + (f"rank {first}" if host.ranks == 1 else f"ranks {first}-{last}")
        )
        first = last + 1
    return lines


def _named_for_mpirun(hosts: Hosts, kind: StarterKind) -> Hosts:
    """This machine under its own name: mpirun recognizes it by that, and does not use ssh to reach it."""
    own_name = socket.gethostname()
    if kind.cuts_own_name:
        own_name = own_name.partition(".")[0]
    named: list[Host] = []
    here: Host | None = None
    for host in hosts.hosts:
        if not is_this_host(host.name):
            if ":" in host.name:
                raise UserError(
                    f"{hosts.where(host)}: {host.name} is an IPv6 address, which every mpirun cuts at "
                    "its first colon. Use a name that resolves to an IPv4 address."
                )
            named.append(host)
            continue
        if here is not None:
            raise UserError(
                f"{hosts.where(host)}: {here.name} and {host.name} are both this machine. "
                "Merge them into one."
            )
        here = host
        named.append(replace(host, name=own_name, user=None, port=None))
    return replace(hosts, hosts=tuple(named))
