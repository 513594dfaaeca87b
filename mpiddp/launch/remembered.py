"""What a job has shown of its hosts, written down for later jobs (mpiddp/hosts/history.py)."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from mpiddp.errors import DONE, FAILED, STOPPED
from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.hosts.names import is_this_host
from mpiddp.launch.options import LaunchOptions
from mpiddp.launch.usable import history_file

if TYPE_CHECKING:
    from mpiddp.hosts.history import Event

_JOB = os.urandom(4).hex()  # this launch


class Ended(NamedTuple):
    """How an attempt has ended. Hosts have the names that mpirun got.

    host: the one that is at fault, "" for none; and the reason.
    slow: the hosts of stragglers, and their part of the others' speed.
    """

    code: int
    host: str = ""
    reason: str = ""
    slow: Mapping[str, float] = MappingProxyType({})


def note_silent(options: LaunchOptions, named: Hosts, silent: Mapping[Host, str]) -> None:
    """Write down the hosts that did not answer the preflight."""
    file = history_file(options, named)
    if file is not None:
        file.append(_event((), {host.key: why for host, why in silent.items()}))


def note_attempt(options: LaunchOptions, named: Hosts, placed: Hosts, ended: Ended) -> None:
    """Write down how an attempt has ended, unless its user or its input ended it.

    Args:
        placed: the hosts of its ranks, under the names that mpirun got.
    """
    file = history_file(options, named) if ended.code in (DONE, FAILED, STOPPED) else None
    if file is None:
        return
    used = tuple(key_of(each.name, named) for each in placed.hosts)
    failed = {key_of(ended.host, named): ended.reason} if ended.host else {}
    slow = {key_of(name, named): part for name, part in ended.slow.items()}
    file.append(replace(_event(used, failed), slow=slow))


def key_of(name: str, named: Hosts) -> str:
    """The key in the list of hosts of one that mpirun got as `name`: this machine under its own name."""
    if is_this_host(name):
        return next((host.key for host in named.hosts if is_this_host(host.name)), name.lower())
    return name.lower()


def _event(hosts: tuple[str, ...], failed: Mapping[str, str]) -> Event:
    from mpiddp.hosts.history import Event

    return Event(time.time(), _JOB, hosts, failed)
