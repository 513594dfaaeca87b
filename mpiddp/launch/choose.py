"""Which of the named hosts a job takes: without those that failed the preflight, and without its spares.

What earlier jobs and attempts have shown of the hosts counts as well (mpiddp/hosts/history.py keeps it).
A job on this machine alone has no memory: it would only tell a script's errors.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
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
    from mpiddp.launch.preflight import HostInfo

Doubts = Mapping[str, str]  # why the job would do better without a host, by its key
_JOB = os.urandom(4).hex()  # this launch


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
    """

    infos: Mapping[Host, HostInfo] = MappingProxyType({})
    complaints: Mapping[Host, str] = MappingProxyType({})
    silent: Mapping[Host, str] = MappingProxyType({})

    @property
    def faultless(self) -> dict[Host, HostInfo]:
        """The infos of the hosts without a complaint."""
        return {host: info for host, info in self.infos.items() if host not in self.complaints}


def choose(
    named: Hosts, checked: Checked, options: LaunchOptions, past: Past
) -> tuple[Hosts, bool]:
    """The hosts that the job takes, and whether hosts are missing, so that fewer ranks may start.

    The last `--spares` hosts are spares. One takes the place of each host with a complaint; without enough of
    them, such hosts are left out, within --min-hosts. So is a host that the job avoids.
    """
    wanted = wanted_hosts(options, named)
    least = options.min_hosts or min(wanted, past.enough or wanted)
    complaints = dict(checked.complaints)
    left = [host for host in named.usable if host not in complaints]
    if complaints and len(left) < least:
        raise UserError("\n".join(dict.fromkeys(complaints.values())))
    for host in [host for host in left if past.avoided and host.key in past.avoided]:
        if len(left) > least:
            left.remove(host)
            complaints[host] = f"{past.avoided[host.key]}."
    for complaint in complaints.values():
        log.info(f"leaving out a host: {complaint}")
    spares = left[wanted:]
    if spares:
        log.info(f"kept in reserve: {', '.join(host.name for host in spares)}")
    doubts = past.avoided or past.flaky
    known = [doubts[host.key] for host in left[:wanted] if doubts and host.key in doubts]
    if known:
        log.info(f"{listed(known, most=3)}: --exclude HOST does without it.")
    chosen = _without(named, {*complaints, *spares})
    return chosen, len(chosen.usable) < max(wanted, past.enough or 0)


def wanted_hosts(options: LaunchOptions, hosts: Hosts) -> int:
    """The number of hosts that the job has if enough of them can be used."""
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


def _without(hosts: Hosts, others: Collection[Host]) -> Hosts:
    return replace(hosts, hosts=tuple(host for host in hosts.hosts if host not in others))


# --- the memory of earlier jobs ---


def of_earlier_jobs(options: LaunchOptions, named: Hosts) -> Past:
    """What the history says of the hosts."""
    path = _history_file(options, named)
    if path is None:
        return Past()
    from mpiddp.hosts import history  # only jobs over several hosts pay for it

    events = history.read(path)
    doubts = {host: history.record_of(host.key, events).doubt for host in named.usable}
    return Past({host.key: f"{host.name} {doubt}" for host, doubt in doubts.items() if doubt})


def remember(
    options: LaunchOptions,
    named: Hosts,
    *,
    used: Collection[str] = (),
    failed: Doubts = MappingProxyType({}),
    slow: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Write down what a preflight or an attempt has shown. Hosts are named by their keys.

    Args:
        failed: the hosts that did not answer, or that ended the attempt, and why.
        slow: the hosts of stragglers, and their part of the others' speed.
    """
    path = _history_file(options, named)
    if path is not None:
        from mpiddp.hosts.history import Event, append

        append(path, Event(time.time(), _JOB, tuple(used), dict(failed), dict(slow)))


def _history_file(options: LaunchOptions, named: Hosts) -> Path | None:
    """The history of these hosts; None on this machine alone, and in a drill, whose faults are no host's."""
    if DRILL in os.environ or all(is_this_host(host.name) for host in named.usable):
        return None
    from mpiddp.hosts.history import file_of

    return file_of(options.hostfile)


def key_of(name: str, named: Hosts) -> str:
    """The key in the list of hosts of one that mpirun got as `name`: this machine under its own name."""
    if is_this_host(name):
        return next((host.key for host in named.hosts if is_this_host(host.name)), name.lower())
    return name.lower()
