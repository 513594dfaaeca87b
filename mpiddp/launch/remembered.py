"""What the launcher knows of the hosts from earlier jobs, and what it writes down for later ones.

A job on this machine alone has no memory: it would only tell a script's errors.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mpiddp.errors import DONE, FAILED, STOPPED
from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.hosts.names import is_this_host
from mpiddp.launch import log
from mpiddp.launch.options import Where
from mpiddp.text import listed

if TYPE_CHECKING:
    from mpiddp.hosts.history import Event, Files

_JOB = os.urandom(4).hex()  # this launch

Doubts = Mapping[str, str]  # why the job would do better without a host, by its key


def doubts(where: Where, named: Hosts) -> Doubts:
    """The hosts that have failed in several of the last jobs."""
    files = _files(where, named)
    if files is None or not files.existing:
        return {}
    history = files.read()
    if history.broken:
        more = f" (and {len(history.broken) - 1} more)" if len(history.broken) > 1 else ""
        log.info(f"{history.broken[0]}{more} is no line of a history, and is skipped.")
    records = {host: history.record(host.key) for host in named.usable}
    return {
        host.key: f"{host.name} {record.summary}"
        for host, record in records.items()
        if record.is_flaky
    }


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


def placed_last(hosts: Hosts, doubted: Doubts) -> Hosts:
    """The hosts in another order: a doubted one takes ranks only if the others have too few slots."""
    order = sorted(hosts.hosts, key=lambda host: host.key in doubted)
    return replace(hosts, hosts=tuple(order))


def left_out(hosts: Sequence[Host], doubted: Doubts, where: Where, least: int) -> dict[Host, str]:
    """The doubted ones of the usable `hosts` that the options allow to leave out, and why.

    Args:
        least: the number of hosts that have to remain.
    """
    doubtful = [host for host in hosts if host.key in doubted]
    found: dict[Host, str] = {}
    for host in doubtful:
        rest = [each for each in hosts if each not in found and each is not host]
        slots = [each.slots for each in rest]
        has_ranks = where.min_ranks is None or (
            None not in slots and sum(filter(None, slots)) >= where.min_ranks
        )
        if len(rest) >= max(1, least) and has_ranks:
            found[host] = f"{doubted[host.key]}."
    return found


def say(doubted: Doubts, used: Hosts, *, avoids: bool) -> None:
    """Say in one line what is known of hosts that take part all the same."""
    known = [doubted[host.key] for host in used.usable if host.key in doubted]
    if not known:
        return
    them = "it" if len(known) == 1 else "them"
    hint = "placed last" if avoids else f"--avoid-flaky does without {them} where it can"
    log.info(f"{listed(known, most=3)}: {hint}.")


def _files(where: Where, named: Hosts) -> Files | None:
    if all(is_this_host(host.name) for host in named.usable):
        return None
    from mpiddp.hosts.history import Files  # only jobs over several hosts pay for it

    return Files.of(where.hostfile, os.environ)


def _event(hosts: tuple[str, ...], failed: Mapping[str, str]) -> Event:
    from mpiddp.hosts.history import Event

    return Event(time.time(), _JOB, hosts, failed)
