"""The doctor's program on each host: it says what the host has, and tries TCP to the other hosts.

A host listens on its address on the job's network alone, and says no more than that bytes have arrived. The
source of this file travels, with that of facts.py. It needs Python 3.8 and the standard library.
"""

from __future__ import annotations

import errno
import json
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Callable

from mpiddp.hosts import facts

CONNECT_S = 3.0
LARGE = 256 << 10  # bytes: more than a link's MTU, so a path that loses large packets stops here
_CONNECTIONS = 64  # at once


def main(proof: str) -> None:
    """Answer three questions in turn: what the host has, on which port it listens, and whom it reaches.

    Then others may still try this host.
    """
    answers: tuple[Callable[[Any], Any], ...] = (facts.doctor_facts, listen, reach)
    for answer, line in zip(answers, sys.stdin.buffer):
        found = answer(json.loads(line))
        print(proof + json.dumps([time.time(), found]), flush=True)
    sys.stdin.read()


def listen(address: str) -> int:
    """Listen on an address. Returns the port. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=512)

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return int(listener.getsockname()[1])


def reach(peers: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Connect to all other hosts at once. The errors for each name, "" for none."""
    with ThreadPoolExecutor(_CONNECTIONS) as threads:
        answers = threads.map(lambda peer: _reach(peer["address"], peer["port"]), peers)
        return {peer["name"]: answer for peer, answer in zip(peers, answers)}


def _reach(address: str, port: int) -> dict[str, str]:
    found = {"error": "", "large": ""}
    try:
        with socket.create_connection((address, port), timeout=CONNECT_S) as connection:
            _send(connection, 1)
            try:
                _send(connection, LARGE)
            except OSError as error:
                found["large"] = _reason(error)
    except OSError as error:
        found["error"] = _reason(error)
    return found


def _send(connection: socket.socket, size: int) -> None:
    """Returns when the other end has `size` bytes."""
    connection.sendall(bytes(size))
    if not connection.recv(1):
        raise OSError("the connection was closed")


def _serve(connection: socket.socket) -> None:
    """The other end: it says when all bytes have arrived."""
    with connection, connection.makefile("rb") as stream:
        connection.settimeout(5 * CONNECT_S)
        with suppress(OSError):
            for size in (1, LARGE):
                if len(stream.read(size)) == size:
                    connection.sendall(b"k")


def _reason(error: OSError) -> str:
    if isinstance(error, socket.timeout):
        return f"no answer in {CONNECT_S:g} s"
    # A route of the kind "blackhole" is an invalid argument to connect(2).
    is_routed = error.errno not in (errno.EINVAL, errno.ENETUNREACH, errno.EHOSTUNREACH)
    return error.strerror or str(error) if is_routed else "no route"
