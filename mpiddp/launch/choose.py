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
from typing import NamedTuple

from mpiddp.errors import UserError
from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.hosts.names import is_this_host
from mpiddp.launch import log
from mpiddp.protocol.variables import DRILL
from mpiddp.text import counted, listed

Doubts = Mapping[str, str]  # why the job would do better without a host, by its key
_NO_DOUBTS: Doubts = MappingProxyType({})
_JOB = os.urandom(4).hex()  # this launch


class Past(NamedTuple):
    """What earlier jobs, or the earlier attempts of this job, have taught about its hosts.

    doubts: of earlier jobs, which are only said; later those of this job, which does without such hosts where
        it can.
    enough: the number of hosts of the first attempt; None before it.
    max_ranks: the most ranks that the job has announced.
    """

    doubts: Doubts = _NO_DOUBTS
    enough: int | None = None
    max_ranks: int | None = None


class Wanted(NamedTuple):
    """The number of hosts that the job takes, and the fewest with which it starts."""

    hosts: int
    least: int


def wanted_hosts(
    hosts: Hosts, spares: int, min_hosts: int | None, enough: int | None = None
) -> Wanted:
    """The numbers by --spares and --min-hosts. `enough` is that of the first attempt, None before it."""
    usable = len(hosts.usable)
    wanted = usable - spares
    if wanted < 1:
        raise UserError(
            f"--spares {spares} leaves no host for the ranks: {hosts.source} has "
            f"{counted(usable, 'host')}."
        )
    if wanted < (min_hosts or 1):
        beside = f" beside {counted(spares, 'spare')}" if spares else ""
        raise UserError(
            f"only {counted(wanted, 'host')} given{beside}, but --min-hosts is {min_hosts}."
        )
    return Wanted(wanted, min_hosts or min(wanted, enough or wanted))


def choose(named: Hosts, complaints: Mapping[Host, str], wanted: Wanted, past: Past) -> Hosts:
    """The hosts that the job takes.

    The last hosts are spares. One takes the place of each host with a complaint; without enough of them, such
    hosts are left out, as long as `wanted.least` remain. So is a host that this job doubts.
    """
    reasons = dict(complaints)
    left = [host for host in named.usable if host not in reasons]
    if reasons and len(left) < wanted.least:
        raise UserError("\n".join(dict.fromkeys(reasons.values())))
    for host in left[:] if past.enough else ():
        if host.key in past.doubts and len(left) > wanted.least:
            left.remove(host)
            reasons[host] = f"{past.doubts[host.key]}."
    for reason in reasons.values():
        log.info(f"leaving out a host: {reason}")
    taken, spares = left[: wanted.hosts], left[wanted.hosts :]
    if spares:
        log.info(f"kept in reserve: {', '.join(host.name for host in spares)}")
    if known := [past.doubts[host.key] for host in taken if host.key in past.doubts]:
        log.info(f"{listed(known, most=3)}: --exclude HOST does without it.")
    left_out = {*reasons, *spares}
    return replace(named, hosts=tuple(host for host in named.hosts if host not in left_out))


# --- the memory of earlier jobs ---


def memory_of(hostfile: str | None) -> Path | None:
    """The history of the hosts of several machines; None in a drill, whose faults are no host's."""
    if DRILL in os.environ:
        return None
    from mpiddp.hosts.history import file_of  # only jobs over several hosts pay for it

    return file_of(hostfile)


def of_earlier_jobs(memory: Path, named: Hosts) -> Past:
    """What the history says of the hosts."""
    from mpiddp.hosts import history

    events = history.read(memory)
    doubts = {host: history.record_of(host.key, events).doubt for host in named.usable}
    return Past({host.key: f"{host.name} {doubt}" for host, doubt in doubts.items() if doubt})


def remember(memory: Path, *, used: Collection[str] = (), failed: Doubts = _NO_DOUBTS) -> None:
    """Write down what a preflight or an attempt has shown. Hosts are named by their keys.

    Args:
        failed: the hosts that did not answer, or that ended the attempt, and why.
    """
    from mpiddp.hosts.history import Event, append

    append(memory, Event(time.time(), _JOB, tuple(used), dict(failed)))


def key_of(name: str, named: Hosts) -> str:
    """The key in the list of hosts of one that mpirun got as `name`: this machine under its own name."""
    here = (host.key for host in named.hosts if is_this_host(name) and is_this_host(host.name))
    return next(here, name.lower())
