"""The names of hosts: sets of them, their addresses, and whether a name is this machine."""

from __future__ import annotations

import re
import socket
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import cache
from itertools import islice, product
from typing import Any

from mpiddp.hosts.interfaces import resolved
from mpiddp.text import shown

MAX_HOSTS = 1 << 18  # Slurm itself allows fewer in one job
_PATTERN = r"(?:[^][,]|\[[^][]*\])+"  # a pattern of names, with commas in its brackets only
_LAST_NUMBER = re.compile(r"([^.]*?)([0-9]{1,9})([^0-9.]*(?:\..*)?)", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_RESOLVED_ONE_BY_ONE, _RESOLVERS = 2, 256


@cache
def is_this_host(name: str) -> bool:
    """Whether `name` is the machine that this process runs on."""
    if name.lower() in ("localhost", socket.gethostname().lower()):
        return True
    for family, address in addresses_of(name):
        # A packet to one of this machine's addresses would come from that address, or from the loopback.
        # Nothing is sent. Binding proves less: a load balancer may bind to addresses that it does not have.
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as packet:
            packet.connect((address[0], 9, *address[2:]))
            if packet.getsockname()[0] in (address[0], "127.0.0.1", "::1"):
                return True
    return False


@cache
def addresses_of(name: str) -> tuple[tuple[socket.AddressFamily, tuple[Any, ...]], ...]:
    """The families and addresses of a host, with port 0. Empty if the name does not resolve."""
    with suppress(OSError):
        return tuple(resolved(name))
    return ()


def forget_addresses() -> None:
    """Resolve names again from now on: a name may have got its address meanwhile."""
    addresses_of.cache_clear()
    is_this_host.cache_clear()


def resolve_all(names: Collection[str]) -> None:
    """Resolve the names at the same time: a name server that does not answer costs seconds for each."""
    if len(names) <= _RESOLVED_ONE_BY_ONE:
        return
    from concurrent.futures import ThreadPoolExecutor  # 5 ms

    with ThreadPoolExecutor(_RESOLVERS) as threads:
        list(threads.map(addresses_of, names))


def expand_nodelist(nodelist: str) -> list[str]:
    """`gpu[07-09,12],login` → gpu07, gpu08, gpu09, gpu12, login; several brackets multiply.

    Raises ValueError for any other text, or more than MAX_HOSTS hosts.
    """
    if not re.fullmatch(f"{_PATTERN}(,{_PATTERN})*", nodelist):
        raise ValueError("the brackets do not match")
    names: list[str] = []
    for pattern in re.findall(_PATTERN, nodelist):
        parts = re.split(r"\[([^]]*)\]", pattern)  # each odd part is the text of brackets
        choices = [_numbers(text) if index % 2 else [text] for index, text in enumerate(parts)]
        names += islice(map("".join, product(*choices)), MAX_HOSTS + 1 - len(names))
    if len(names) > MAX_HOSTS:
        raise ValueError(f"more than {MAX_HOSTS} hosts")
    for name in names:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{shown(name)!r} is not the name of a host")
    return names


def _numbers(ranges: str) -> list[str]:
    """`07-09,12` → 07, 08, 09, 12."""
    numbers: list[str] = []
    for item in ranges.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", item)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or not low <= high < low + MAX_HOSTS:
            raise ValueError(f"{shown(item)!r} is not a range such as 07-09")
        numbers += [str(number).zfill(len(match[1])) for number in range(low, high + 1)]
    return numbers


def compress_names(names: Sequence[str]) -> str:
    """node1, node2, node3, login → "node[1-3],login": each name once, in the order of their first name."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in dict.fromkeys(names):
        # An address is no name with a number: 10.0.0.1 and 10.0.0.2 are printed in full.
        match = None if name[0].isdigit() or ":" in name else _LAST_NUMBER.fullmatch(name)
        key, number = ((match[1], match[3]), match[2]) if match else ((name, ""), "")
        groups.setdefault(key, []).append(number)
    texts = []
    for (before, after), numbers in groups.items():
        ranges: list[list[str]] = []
        for number in sorted(numbers, key=lambda text: (len(text), text)):
            last = ranges[-1][-1] if ranges else ""
            follows = last and number == str(int(last) + 1).zfill(len(last))
            ranges[-1].append(number) if follows else ranges.append([number])
        inside = [run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ranges]
        texts.append(before + (inside[0] if len(numbers) == 1 else f"[{','.join(inside)}]") + after)
    return ",".join(texts)
