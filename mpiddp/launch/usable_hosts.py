"""The hosts of a job: those that the user names, without unusable ones that the job can do without."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

from mpiddp.errors import UserError
from mpiddp.hosts.allocation import Allocation, find_allocation
from mpiddp.hosts.hostfile import Host, Hosts, parse_host_list, read_hostfile
from mpiddp.hosts.nodes import UnusableHosts
from mpiddp.hosts.slots import exclude
from mpiddp.hosts.slurm_terminal import in_slurm_terminal
from mpiddp.launch import log
from mpiddp.launch.options import Where
from mpiddp.text import all_of, counted
from mpiddp.world import World

if TYPE_CHECKING:
    from mpiddp.launch.remote.preflight import HostInfo

THIS_MACHINE = Hosts("this machine", (Host("localhost"),))

_read_once = cache(read_hostfile)  # a pipe can be read only once, but a restart needs it again


Named = tuple[Hosts, Allocation | None]  # the hosts that the user names, or those of an allocation


@dataclass(frozen=True)
class UsableHosts:
    """The hosts of the job, which passed the preflight, and its results; {} if it did not run.

    `some_left_out`: the user named more hosts, not counting spares. `left_out` are their names.
    """

    hosts: Hosts
    info: Mapping[Host, HostInfo]
    some_left_out: bool = False
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Earlier:
    """What the attempts so far say about the hosts of the next one.

    named: the hosts to choose from. used: those of the latest attempt; the others must have their versions.
    enough: the number of hosts of the first attempt, which suffices. info: results of the preflight that
    are recent enough.
    """

    named: Named
    used: tuple[Host, ...]
    enough: int
    info: Mapping[Host, HostInfo] = field(default_factory=dict)


def find_hosts(where: Where, env: Mapping[str, str]) -> Named:
    """The hosts that the user names, else those of an allocation, which is returned too, else this machine.

    Raises:
        UserError: an invalid hostfile, list or allocation.
    """
    allocation = None
    hosts = THIS_MACHINE
    if where.hostfile is not None:
        # Names that differ only after their first dot are two hosts. Every MPI has an option for that.
        is_file = os.path.isfile(where.hostfile)  # noqa: PTH113 - False for any error
        read = read_hostfile if is_file else _read_once
        hosts = read(where.hostfile, keep_fqdn=True)
    elif where.host_list is not None:
        hosts = parse_host_list(where.host_list, keep_fqdn=True)
    elif not where.local and (allocation := find_allocation(env)):
        hosts = allocation.hosts
    if where.exclude is not None:
        hosts = exclude(hosts, where.exclude)
    return hosts, allocation


def refuse_inside_a_rank(where: Where, env: Mapping[str, str]) -> None:
    """Refuse to start a job from each rank of another launcher, unless the user names the hosts.

    Raises:
        UserError: this process is one of several ranks, or only some of a launcher's variables are set.
    """
    if where.names_hosts or where.local or in_slurm_terminal(env):
        return
    world = World.from_env(env)
    if world.world_size > 1:
        name = world.launcher.rank
        raise UserError(
            f"mpiddp launch starts all ranks itself, but {name}={env[name]} says that this is already one "
            f"of {world.world_size} ranks ({world.launcher.name}). Write mpiddp run in place of mpiddp "
            f"launch, or start it once; --local starts a job on this machine alone."
        )


def check_hosts(
    where: Where,
    hosts: Hosts,
    preflight: Callable[[Hosts], Mapping[Host, HostInfo]],
    enough: int | None = None,
) -> UsableHosts:
    """The hosts that pass the preflight, without the spares that the job does not need.

    The last `--spares` hosts are spares. One takes the place of each unusable host; without enough of
    them, unusable hosts are left out, within --min-hosts and --min-ranks.

    Args:
        enough: the number of hosts with which the job has started. A host that was added since may be
            left out whatever the options.

    Raises:
        UserError: too few hosts remain.
    """
    wanted = _wanted(where, hosts)
    enough = wanted if enough is None else enough
    left_out: Mapping[Host, str] = {}
    try:
        info = preflight(hosts)
    except UnusableHosts as unusable:
        left_out = unusable.complaints
        left = tuple(host for host in hosts.hosts if host not in left_out)
        least = (where.min_hosts or 1) if where.can_shrink else min(wanted, enough)
        if count_usable(left) < least:
            raise
        hosts = replace(hosts, hosts=left)
        for complaint in left_out.values():
            log.info(f"leaving out a host: {complaint}")
        info = preflight(hosts)
    some_left_out = count_usable(hosts.hosts) < max(wanted, enough)
    hosts, spares = _without_spares(hosts, wanted)
    if spares:
        log.info(f"kept in reserve: {all_of([host.name for host in spares])}")
    used = {host: info[host] for host in hosts.hosts if host in info}
    return UsableHosts(hosts, used, some_left_out, tuple(host.name for host in left_out))


def _wanted(where: Where, hosts: Hosts) -> int:
    """The number of hosts that the job has if enough of them can be used."""
    usable = count_usable(hosts.hosts)
    wanted = usable - where.spares
    if wanted < 1:
        raise UserError(
            f"--spares {where.spares} leaves no host for the ranks: {hosts.source} has "
            f"{counted(usable, 'host')}."
        )
    if wanted < (where.min_hosts or 1):
        beside = f" beside {counted(where.spares, 'spare')}" if where.spares else ""
        raise UserError(
            f"only {counted(wanted, 'host')} given{beside}, but --min-hosts is {where.min_hosts}."
        )
    return wanted


def _without_spares(hosts: Hosts, wanted: int) -> tuple[Hosts, tuple[Host, ...]]:
    """The first `wanted` hosts that take ranks, in their order, and the others of these."""
    usable = [host for host in hosts.hosts if host.slots != 0]
    spares = tuple(usable[wanted:])
    return replace(hosts, hosts=tuple(host for host in hosts.hosts if host not in spares)), spares


def count_usable(hosts: tuple[Host, ...]) -> int:
    """The number of hosts that take ranks: those with slots=0 do not."""
    return sum(host.slots != 0 for host in hosts)
