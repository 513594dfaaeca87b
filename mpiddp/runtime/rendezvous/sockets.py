"""The sockets of a rendezvous: read the port, resolve names, bind one address, probe several addresses.

Rank 0 binds its port before it announces it, so no other process can take the port in between.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

from mpiddp.errors import JobFailed, UserError, cause_of
from mpiddp.text import parse_whole, shown

# A name server answers so if the name is wrong. Any other answer is a failure of the network.
_WRONG_NAME = frozenset({socket.EAI_NONAME, socket.EAI_NODATA})
PROBE_TIMEOUT_S = 2.0


def port_in(env: Mapping[str, str]) -> int:
    """MASTER_PORT, or 0 (any free port) if it is unset. Raises UserError if it is not a port."""
    text = env.get("MASTER_PORT") or "0"
    try:
        return parse_whole(text, 0, 1 << 16)
    except ValueError:
        raise UserError(
            f'MASTER_PORT="{shown(text)}" is not a port. Expected 1 to 65535, or unset.'
        ) from None


def resolve(name: str) -> str:
    """The address of a host, given its name or its address. IPv4 takes precedence over IPv6.

    Raises UserError if there is no such name, and JobFailed if no name server answers.
    """
    from mpiddp.hosts.interfaces import resolved  # few scripts need it

    try:
        _, address = resolved(name)[0]
    except OSError as error:
        sentence = f"{name}: cannot be resolved from {socket.gethostname()}"
        if error.errno not in _WRONG_NAME:
            raise JobFailed(f"{sentence}: {error.strerror}.") from None
        fix = "add it to DNS or /etc/hosts, or set MASTER_ADDR to an address of the host where rank 0 runs"
        raise UserError(f"{sentence}.", fix=fix) from None
    return str(address[0])


def resolve_own(name: str) -> str:
    """The address by which other hosts reach this one. /etc/hosts of Debian has 127.0.1.1 for its name.

    Raises UserError if it has no such address, and JobFailed as `resolve` does.
    """
    import ipaddress

    from mpiddp.hosts.interfaces import interfaces

    address = resolve(name)
    if not ipaddress.ip_address(address).is_loopback:
        return address
    addresses = [i.address for i in interfaces() if not (i.is_loopback or i.is_virtual)]
    if not addresses:
        raise UserError(
            f"{name} resolves to {address} on {socket.gethostname()}, which other hosts cannot reach.",
            fix="set MASTER_ADDR to an address of that host, where rank 0 runs, that they can reach",
        )
    return addresses[0]


class Sockets(NamedTuple):
    """Rank 0's sockets at the address of the job, which are bound before the ranks hear of them."""

    store: socket.socket | None = None  # listens, for torch's store
    master: socket.socket | None = None  # has MASTER_PORT; None if that is the store's

    def close(self) -> None:
        for each in filter(None, self):
            each.close()


def bind(address: str, port: int, hostname: str) -> socket.socket:
    """A socket that listens on one address of this host, `hostname`. Port 0 means any free port.

    Raises UserError for an address of another host or a MASTER_PORT in use, else JobFailed.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=2048)
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            why = f"{address} is not an address of {hostname}, where rank 0 runs"
            raise UserError(
                f"{why}.", fix="unset MASTER_ADDR, or set it to one of that host"
            ) from None
        if error.errno == errno.EADDRINUSE and os.environ.get("MASTER_PORT"):
            why = f"MASTER_PORT={port} is in use on {hostname} ({address})"
            raise UserError(f"{why}.", fix="unset it, so that mpiddp chooses a free port") from None
        if error.errno == errno.EADDRINUSE:
            of_slurm = "which follows from the ids of Slurm's job and step"
            why = f"port {port}, {of_slurm}, is in use on {hostname} ({address})"
            raise JobFailed(
                f"{why}.", fix="start the job again, or set MASTER_PORT to a free port"
            ) from None
        why = f"rank 0 cannot listen on {address} port {port} of {hostname}: {error.strerror}."
        raise cause_of(error)(why) from None


def stop_listening(bound: socket.socket) -> None:
    """Keep the port of this socket, so that nobody takes it unless a program asks for just this port."""
    address = bound.getsockname()
    bound.shutdown(socket.SHUT_RD)
    with suppress(OSError):  # it is bound, unless the kernel has chosen the port
        bound.bind(address)


def reachable(addresses: Sequence[str], ports: Sequence[int]) -> list[str]:
    """The addresses that accept a TCP connection within `PROBE_TIMEOUT_S`. All are tried at once."""
    reached: list[str] = []
    deadline = time.monotonic() + PROBE_TIMEOUT_S
    with ExitStack() as opened, selectors.DefaultSelector() as selector:
        for address, port in zip(addresses, ports, strict=True):
            with suppress(OSError):  # a host without IPv6
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                client = opened.enter_context(socket.socket(family))
                client.setblocking(False)
                # Without a route, the selector would report the socket as connected.
                if client.connect_ex((address, port)) in (0, errno.EINPROGRESS):
                    selector.register(client, selectors.EVENT_WRITE, address)
        while selector.get_map() and (remaining := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(remaining):
                error = key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)  # type: ignore[union-attr]
                reached += [] if error else [key.data]
                selector.unregister(key.fileobj)
            if addresses[0] in reached:  # it is the best, so do not wait for other networks
                deadline = min(deadline, time.monotonic() + 0.05)
    return reached
