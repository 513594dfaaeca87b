"""Whether hosts reach each other: all run this program at the same time, and each connects to each.

A host listens on its address on the job's network alone, and answers only that bytes have arrived. This
module travels to the hosts as source. It needs Python 3.8 and the standard library.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from typing import Any

from mpiddp.hosts.interfaces import interfaces

CONNECT_S = 3.0
# Ports to try. The kernel chooses those of the ranks from this range, too, and a busy host has many in use: also
# a connection that has ended holds its port for a minute.
PORTS, MOST_PORTS = range(33_000, 60_000), 3
LARGE = 256 << 10  # bytes; they need packets of full size, which a path with a wrong MTU loses
_AT_ONCE = 64  # connections
_PAUSE_S = 0.02
_OF_TCP = 128  # bytes of tcp_info, up to the fields of Linux 4.1


def meet(
    addresses: dict[str, str], port: int, start_s: float, most: int
) -> dict[str, dict[str, str]] | None:
    """Connect to the other hosts, and answer them. Returns the errors for each name, as `_reach` does.

    None if another program has the port on this host. Every host calls this with the same arguments, all of them
    within `start_s`. Of more than `most` hosts, each connects only to the first one and to its two neighbours.
    """
    from concurrent.futures import ThreadPoolExecutor  # 10 ms

    until = time.monotonic() + start_s
    of_this_host = {interface.address for interface in interfaces()}
    names = [*addresses]
    at = next(at for at, name in enumerate(names) if addresses[name] in of_this_host)
    me, address = names[at], addresses[names[at]]
    near = {names[0], names[at - 1], names[(at + 1) % len(names)]}
    # The first host connects to all, because all connect to it: so each direction is tried.
    has_all = at == 0 or len(names) <= most
    others = {name: addresses[name] for name in names if name != me and (has_all or name in near)}
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    threads = ThreadPoolExecutor(_AT_ONCE)
    try:
        with socket.create_server((address, port), family=family, backlog=512) as listener, threads:
            answers = threads.map(lambda address: _reach(address, port, until), others.values())
            _serve(listener, len(others), until)
            return dict(zip(others, answers))
    except RuntimeError:  # Thread.start has no number for it
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return None


def _reach(address: str, port: int, until: float) -> dict[str, str]:
    """The "error" of a connection, and of a "large" message over it; "" if there is none.

    A connection that is refused is tried again until `until`, because the host may start later.
    """
    part = "error"
    while True:
        try:
            with socket.create_connection((address, port), timeout=CONNECT_S) as connection:
                _send(connection, 1)
                part = "large"
                _send(connection, LARGE)
                return {"error": "", "large": ""}
        except OSError as error:
            if not isinstance(error, ConnectionRefusedError) or time.monotonic() > until:
                return {"error": "", "large": "", part: reason(error)}
        time.sleep(_PAUSE_S)


def _send(connection: socket.socket, size: int) -> None:
    """Send `size` bytes, and wait until the other end has them.

    On a busy host, the program may not answer in time. The network is fine nevertheless, if the kernel there
    has confirmed the bytes, or at least a packet of full size.
    """
    packet, before = _confirmed(connection)
    try:
        connection.sendall(bytes(size))
        if not connection.recv(1):
            raise OSError("the connection was closed")
    except TimeoutError:
        if _confirmed(connection)[1] - before < min(size, packet):
            raise


def _confirmed(connection: socket.socket) -> tuple[int, int]:
    """The bytes of a packet of full size, and the bytes that the kernel of the other end has confirmed."""
    facts = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _OF_TCP)  # linux/tcp.h
    return struct.unpack_from("I", facts, 16)[0], struct.unpack_from("Q", facts, 120)[0]


def _serve(listener: socket.socket, count: int, until: float) -> None:
    """Answer connections of `_reach` until `count` hosts are done: say that all bytes have arrived."""
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while count and (left_s := until - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                connection: Any = key.fileobj
                if connection is listener:
                    selector.register(listener.accept()[0], selectors.EVENT_READ, [0])
                    continue
                try:
                    chunk = connection.recv(1 << 16)
                    key.data[0] += len(chunk)
                    if chunk and key.data[0] in (1, 1 + LARGE):
                        connection.send(b"k")
                        count -= key.data[0] > 1
                except OSError:
                    chunk = b""
                if not chunk:
                    selector.unregister(connection)
                    connection.close()


def reason(error: OSError) -> str:
    """The reason why a connection failed."""
    if isinstance(error, socket.timeout):
        return f"no answer in {CONNECT_S:g} s"
    # A route of the kind "blackhole" is an invalid argument to connect(2).
    is_routed = error.errno not in (errno.EINVAL, errno.ENETUNREACH, errno.EHOSTUNREACH)
    return error.strerror or str(error) if is_routed else "no route"


def blocked(
    answers: Mapping[str, Mapping[str, Any]], addresses: Mapping[str, str], port: int
) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """The faults that the answers of `meet` show. A fault is one host or two hosts, a fact, and its fix."""
    at = {name: f"{address} tcp/{port}" for name, address in addresses.items()}
    errors = {(a, b): answer["error"] for a in answers for b, answer in answers[a].items()}
    unreached = {
        name
        for name in answers
        if len(answers) > 2 and all(error for pair, error in errors.items() if pair[1] == name)
    }
    for name in sorted(unreached):
        error = next(error for pair, error in errors.items() if pair[1] == name)
        fact = f"no other host reaches {name} ({at.get(name)}): {error}"
        yield (name,), fact, f"allow TCP on {name} from the other hosts; see: ssh {name} ip addr"
    for (here, there), error in errors.items():
        answer = answers[here][there]
        if error and there not in unreached:
            way = "" if errors.get((there, here), "-") else f"; {there} → {here} is open"
            fact = f"{here} → {there} ({at.get(there)}) fails: {error}{way}"
            see = f"see: ssh {here} ip route get {addresses[there]}"
            yield (there, here), fact, f"allow TCP from {here} on {there}; {see}"
        elif answer["large"]:
            fact = f"{here} → {there} carries small messages but no large ones ({answer['large']})"
            yield (there, here), fact, "set the same MTU on the hosts and the switch"
