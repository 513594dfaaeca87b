"""What earlier jobs and attempts have shown of the hosts, and what is written down for later ones.

A job on this machine alone has no memory: it would only tell a script's errors.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mpiddp.errors import DONE, FAILED, STOPPED
from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.hosts.names import is_this_host
from mpiddp.launch import log
from mpiddp.launch.options import Where
from mpiddp.protocol.variables import DRILL

if TYPE_CHECKING:
    from mpiddp.hosts.history import Event, Files

_JOB = os.urandom(4).hex()  # this launch

Doubts = Mapping[str, str]  # why the job would do better without a host, by its key


@dataclass(frozen=True)
class Past:
    """What earlier jobs, or the earlier attempts of this job, have taught about its hosts.

    flaky: those that have failed in several of the last jobs. They are named, and take part.
    avoided: those that the job does without where it can.
    proven: the hosts of the latest attempt, which have run the job; none before the first.
    enough: the number of hosts of the first attempt; None before it.
    max_ranks: the most ranks that the job has announced.
    """

    flaky: Doubts = field(default_factory=dict)
    avoided: Doubts = field(default_factory=dict)
    proven: tuple[Host, ...] = ()
    enough: int | None = None
    max_ranks: int | None = None


def of_earlier_jobs(where: Where, named: Hosts) -> Past:
    """What the history says of the hosts. With --avoid-flaky, the job does without the flaky ones."""
    files = _files(where, named)
    if files is None or not files.existing:
        return Past()
    history = files.read()
    if history.broken:
        more = f" (and {len(history.broken) - 1} more)" if len(history.broken) > 1 else ""
        log.info(f"{history.broken[0]}{more} is no line of a history, and is skipped.")
    records = {host: history.record(host.key) for host in named.usable}
    flaky = {
        host.key: f"{host.name} {record.summary}"
        for host, record in records.items()
        if record.is_flaky
    }
    return Past(avoided=flaky) if where.avoid_flaky else Past(flaky)


def note_silent(where: Where, named: Hosts, silent: Mapping[Host, str]) -> None:
    """Write down the hosts that did not answer the preflight."""
    files = _files(where, named) if silent else None
    if files is not None:
        files.append(_event((), {host.key: reason for host, reason in silent.items()}))


def note_attempt(
    where: Where, named: Hosts, placed: Hosts, code: int, fault: tuple[str, str]
) -> None:
    """Write down how an attempt has ended, unless its user or its input ended it.

    Args:
        placed: the hosts of its ranks, under the names that mpirun got.
        fault: the one of these that is at fault, and why; "" for none.
    """
    files = _files(where, named) if code in (DONE, FAILED, STOPPED) else None
    if files is None:
        return
    host, reason = fault
    used = tuple(key_of(each.name, named) for each in placed.hosts)
    files.append(_event(used, {key_of(host, named): reason} if host else {}))


def key_of(name: str, named: Hosts) -> str:
    """The key in the list of hosts of one that mpirun got as `name`: this machine under its own name."""
    if is_this_host(name):
        return next((host.key for host in named.hosts if is_this_host(host.name)), name.lower())
    return name.lower()


def _files(where: Where, named: Hosts) -> Files | None:
    if DRILL in os.environ or all(is_this_host(host.name) for host in named.usable):
        return None  # a drill's faults are no host's
    from mpiddp.hosts.history import Files  # only jobs over several hosts pay for it

    return Files.of(where.hostfile, os.environ)


def _event(hosts: tuple[str, ...], failed: Mapping[str, str]) -> Event:
    from mpiddp.hosts.history import Event

    return Event(time.time(), _JOB, hosts, failed)
