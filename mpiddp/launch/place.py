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
from mpiddp.launch.options import LaunchOptions
from mpiddp.launch.preflight import HostInfo
from mpiddp.launch.starters.command import StarterKind
from mpiddp.launch.variables import env_on_host
from mpiddp.text import counted, listed


def with_slots(hosts: Hosts, infos: Mapping[Host, HostInfo], options: LaunchOptions) -> Hosts:
    """The hosts with known slot counts. Logs those that the user may not expect.

    Args:
        infos: of the hosts that the preflight has checked.
    """
    found = replace(
        hosts,
        hosts=tuple(
            replace(host, slots=_slots(hosts, host, infos.get(host), options))
            for host in hosts.hosts
        ),
    )
    if not options.names_hosts:
        log.info(f"no hosts given: using {hosts.source}, slots={found.total_slots}")
    return found


def _slots(hosts: Hosts, host: Host, info: HostInfo | None, options: LaunchOptions) -> int | None:
    """As written; without a count one slot per GPU, or 1 without GPUs. None if nobody knows the GPUs."""
    is_here, is_gloo = is_this_host(host.name), options.backend == "gloo"
    is_compared = not is_gloo and (info is not None or (is_here and len(hosts.hosts) == 1))
    gpus = 0
    # The vendor's tool of this machine may take seconds, so it runs only if its answer matters.
    if info or (is_here and (host.slots is None or host.gpus or (is_compared and host.slots > 1))):
        env = env_on_host(host.name, os.environ, options.variables)
        gpus = _visible_gpus(host, _gpus_here(host, env) if info is None else info.gpus, env)
    if host.slots is not None:
        return _fitted(hosts, host, gpus, options.backend) if is_compared else host.slots
    most = host.max_slots or sys.maxsize
    is_default = options.host_list == "localhost" or not (options.names_hosts or hosts.scheduler)
    if is_default and options.names_ranks:  # the user requests a number
        return min(most, (0 if is_gloo else gpus) or len(os.sched_getaffinity(0)))
    if info or is_here:
        return min(most, gpus or 1)
    if not options.dry_run:
        return None
    log.info(f"{host.name} has no slot count, and a dry run contacts no host: assuming slots=1")
    return 1


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

    Args:
        installed: None if the vendor's tool does not answer, which matters only for a job that uses GPUs.
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


def _fitted(hosts: Hosts, host: Host, gpus: int, backend: str | None) -> int:
    """The host's slots as written. A scheduler's, which may be cores, are no more than the GPUs.

    Args:
        backend: the one that the job requests. "auto" is nccl on GPUs; None is unknown.
    """
    slots = slots_of(hosts, host)
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
    room = {host: _room(hosts, host, npernode) for host in hosts.hosts}
    left = total = sum(room.values())
    if n is not None and n > total and not may_be_fewer:
        raise _too_many(n, npernode, hosts, total)
    left = min(each for each in (total, n, max_ranks) if each is not None)
    placed = []
    for host, seats in room.items():
        if ranks := min(left, seats):
            placed.append(replace(host, ranks=ranks))
        left -= ranks
    found = replace(hosts, hosts=tuple(placed))
    return found if kind.has_scheduler else _named_for_mpirun(found, kind)


def _room(hosts: Hosts, host: Host, npernode: int | None) -> int:
    slots = slots_of(hosts, host)
    if npernode is not None and npernode > slots > 0:
        raise UserError(
            f"--npernode {npernode} is more than the {slots} slots of {host.name} "
            f"({hosts.where(host)})."
        )
    return slots if npernode is None else min(npernode, slots)


def _too_many(n: int, npernode: int | None, hosts: Hosts, total: int) -> UserError:
    if npernode is not None:
        return UserError(
            f"-n {n} is more than --npernode {npernode} allows on the "
            f"{counted(len(hosts.usable), 'host')} of {hosts.source}: {counted(total, 'rank')}."
        )
    slots = listed([f"{host.name}={host.slots}" for host in hosts.hosts])
    return UserError(f"-n {n} is more than the {total} slots of {hosts.source} ({slots}).")


def ranks_by_host(hosts: Hosts) -> list[str]:
    """One line per host with its ranks: "node1: ranks 0-3"."""
    lines, first = [], 0
    for host in hosts.hosts:
        last = first + host.ranks - 1
        ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
        lines.append(f"{host.name}: {ranks}")
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
