"""The names of hosts: their addresses, and whether a name is this machine."""

from __future__ import annotations

import socket
from collections.abc import Collection
from contextlib import suppress
from functools import cache
from typing import Any

_RESOLVED_ONE_BY_ONE, _RESOLVERS = 2, 256


@cache
def is_this_host(name: str) -> bool:
    """Whether `name` is the machine that this process runs on."""
    if name.lower() in ("localhost", socket.gethostname().lower()):
        return True
    for family, address in addresses_of(name):
        # A packet to an own address would come from that address, or from the loopback. Nothing is sent.
        # Binding proves less: a load balancer may bind to addresses that it does not have.
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as packet:
            packet.connect((address[0], 9, *address[2:]))
            if packet.getsockname()[0] in (address[0], "127.0.0.1", "::1"):
                return True
    return False


@cache
def addresses_of(name: str) -> tuple[tuple[socket.AddressFamily, tuple[Any, ...]], ...]:
    """The families and addresses of a host, with port 0. Empty if the name does not resolve."""
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # UnicodeError for an invalid name
        return ()
    return tuple((family, address) for family, _, _, _, address in found)


def forget_addresses() -> None:
    """Resolve names again: a host may have got its name since."""
    addresses_of.cache_clear()
    is_this_host.cache_clear()


def resolve_all(names: Collection[str]) -> None:
    """Resolve the names at the same time: a name server that does not answer costs seconds for each."""
    if len(names) <= _RESOLVED_ONE_BY_ONE:
        return
    from concurrent.futures import ThreadPoolExecutor  # 5 ms

    with ThreadPoolExecutor(_RESOLVERS) as threads:
        list(threads.map(addresses_of, names))
