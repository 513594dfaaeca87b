"""Which of the named hosts a job takes: without those that failed the preflight, and without its spares.

What earlier jobs and attempts have shown of the hosts counts as well (remembered.py writes it down). A job on
this machine alone has no memory: it would only tell a script's errors.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from mpiddp.errors import UserError
from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.hosts.names import is_this_host
from mpiddp.launch import log
from mpiddp.launch.options import LaunchOptions
from mpiddp.protocol.variables import DRILL
from mpiddp.text import counted, listed

if TYPE_CHECKING:
    from mpiddp.hosts.history import File
    from mpiddp.launch.preflight import HostInfo

Doubts = Mapping[str, str]  # why the job would do better without a host, by its key


class Past(NamedTuple):
    """What earlier jobs, or the earlier attempts of this job, have taught about its hosts.

    flaky: those that have failed in several of the last jobs, or were slow. They are named, and take part.
    avoided: those that the job does without where it can.
    proven: the hosts of the latest attempt, which have run the job; none before the first.
    enough: the number of hosts of the first attempt; None before it.
    max_ranks: the most ranks that the job has announced.
    """

    flaky: Doubts = MappingProxyType({})
    avoided: Doubts = MappingProxyType({})
    proven: tuple[Host, ...] = ()
    enough: int | None = None
    max_ranks: int | None = None


class Checked(NamedTuple):
    """What a preflight has found; nothing if none was run.

    infos: what each host has. complaints: why some hosts cannot be used.
    silent: of the complaints, those about hosts that have not answered.
    differences: of the versions of the others, a sentence each.
    """

    infos: Mapping[Host, HostInfo] = MappingProxyType({})
    complaints: Mapping[Host, str] = MappingProxyType({})
    silent: Mapping[Host, str] = MappingProxyType({})
    differences: tuple[str, ...] = ()

    @property
    def faultless(self) -> dict[Host, HostInfo]:
        """The infos of the hosts without a complaint."""
        return {host: info for host, info in self.infos.items() if host not in self.complaints}


def keep_usable(named: Hosts, checked: Checked, options: LaunchOptions, past: Past) -> Hosts:
    """The hosts without those that failed the preflight, and without the spares that the job does not need.

    The last `--spares` hosts are spares. One takes the place of each unusable host; without enough of
    them, unusable hosts are left out, within --min-hosts. A host that the job avoids is left
    out as far as this is allowed; else it takes ranks only if the others have too few slots.

    Raises:
        UserError: too few hosts remain, or their versions differ.
    """
    wanted = wanted_hosts(options, named)
    least = options.min_hosts if options.min_hosts else min(wanted, past.enough or wanted)
    avoided_last = sorted(named.hosts, key=lambda host: host.key in past.avoided)
    left = _without(replace(named, hosts=tuple(avoided_last)), checked.complaints)
    if checked.complaints and len(left.usable) < least:
        raise UserError("\n".join(checked.complaints.values()))
    avoided = _left_out(left.usable, past, least)
    left = _without(left, avoided)
    for complaint in (*checked.complaints.values(), *avoided.values()):
        log.info(f"leaving out a host: {complaint}")
    spares = left.usable[wanted:]
    if spares:
        log.info(f"kept in reserve: {', '.join(host.name for host in spares)}")
    kept = _without(left, spares)
    _say_doubts(kept, past)
    if checked.differences:
        raise UserError("\n".join(checked.differences))
    return kept


def wanted_hosts(options: LaunchOptions, hosts: Hosts) -> int:
    """The number of hosts that the job has if enough of them can be used.

    Raises:
        UserError: the options want more hosts than are named.
    """
    usable = len(hosts.usable)
    wanted = usable - options.spares
    if wanted < 1:
        raise UserError(
            f"--spares {options.spares} leaves no host for the ranks: {hosts.source} has "
            f"{counted(usable, 'host')}."
        )
    if wanted < (options.min_hosts or 1):
        beside = f" beside {counted(options.spares, 'spare')}" if options.spares else ""
        raise UserError(
            f"only {counted(wanted, 'host')} given{beside}, but --min-hosts is {options.min_hosts}."
        )
    return wanted


def has_fewer(usable: Hosts, named: Hosts, options: LaunchOptions, past: Past) -> bool:
    """Whether hosts are missing, so that fewer ranks than `-n` may start."""
    return len(usable.usable) < max(wanted_hosts(options, named), past.enough or 0)


def _without(hosts: Hosts, others: Collection[Host]) -> Hosts:
    return replace(hosts, hosts=tuple(host for host in hosts.hosts if host not in others))


def _left_out(hosts: Sequence[Host], past: Past, least: int) -> dict[Host, str]:
    """The avoided ones of the usable `hosts` that the options allow to leave out, and why.

    Args:
        least: the number of hosts that have to remain, 1 or more.
    """
    found: dict[Host, str] = {}
    for host in hosts:
        if host.key not in past.avoided:
            continue
        rest = [each for each in hosts if each not in found and each is not host]
        if len(rest) >= least:
            found[host] = f"{past.avoided[host.key]}."
    return found


def _say_doubts(used: Hosts, past: Past) -> None:
    """Say in one line what is known of hosts that take part all the same."""
    doubts = past.avoided or past.flaky
    known = [doubts[host.key] for host in used.usable if host.key in doubts]
    if not known:
        return
    hint = "placed last" if past.avoided else "--exclude HOST does without it"
    log.info(f"{listed(known, most=3)}: {hint}.")


def of_earlier_jobs(options: LaunchOptions, named: Hosts) -> Past:
    """What the history says of the hosts."""
    file = history_file(options, named)
    if file is None:
        return Past()
    history = file.read()
    records = {host: history.record(host.key) for host in named.usable}
    flaky = {
        host.key: f"{host.name} {record.doubt}" for host, record in records.items() if record.doubt
    }
    return Past(flaky)


def history_file(options: LaunchOptions, named: Hosts) -> File | None:
    """The history of these hosts; None on this machine alone, and in a drill, whose faults are no host's."""
    if DRILL in os.environ or all(is_this_host(host.name) for host in named.usable):
        return None
    from mpiddp.hosts.history import File  # only jobs over several hosts pay for it

    return File.of(options.hostfile)
