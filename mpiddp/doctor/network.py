"""TCP between two hosts, as `mpiddp doctor` tries it: it sends this source to each.

A host listens on its address on the job's network alone. Whoever connects proves that it knows the doctor's
secret, which ssh has brought; the secret itself is never sent.
It needs Python 3.8 and the standard library.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

CONNECT_S = 3.0
LARGE = 256 << 10  # bytes: more than a link's MTU, so a path that loses large packets stops here
_MOST = 64 << 20
_LONG_ENOUGH_S = 0.1
_ROUND_TRIPS = 20
_SEARCHED = 20  # ports, for one that is free
_SIZE = struct.Struct(">Q")


class Listener:
    """The other ends of the connections: it takes any number of bytes, and says when it has them."""

    def __init__(self) -> None:
        self._secret = b""

    def listen(
        self, address: str, secret: str, port: int = 0, near: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Listen on one address: on any port, on `port` unless it is 0, on a free one from each of `near` on.

        Returns the "port" that is any, the other "ports", and why `port` is "busy", "" if it is not. Raises
        OSError.
        """
        self._secret = bytes.fromhex(secret)
        found: dict[str, Any] = {"port": self._listen(address, 0), "ports": [], "busy": ""}
        if port:
            try:
                found["ports"].append(self._listen(address, port))
            except OSError as error:
                found["busy"] = error.strerror
        for first in near:
            for each in range(first, min(first + _SEARCHED, 1 << 16)):
                with suppress(OSError):  # another program has it
                    found["ports"].append(self._listen(address, each))
                    break
        return found

    def _listen(self, address: str, port: int) -> int:
        listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
            listener.listen(512)
        except OSError:
            listener.close()
            raise
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return int(listener.getsockname()[1])

    def _accept(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(5 * CONNECT_S)
            try:
                nonce = os.urandom(32)
                connection.sendall(nonce)
                if not hmac.compare_digest(_read(connection, 32), _proof(self._secret, nonce)):
                    return
                while True:
                    (left,) = _SIZE.unpack(_read(connection, _SIZE.size))
                    while left:
                        left -= len(_some(connection, left))
                    connection.sendall(b"k")
            except OSError:
                return


def reach(wanted: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Connect to all other hosts at once. For each name this end's address and a port, or the errors."""
    peers, secret = wanted["peers"], wanted["secret"]
    others = [(peer, port) for peer in peers for port in peer["ports"]]
    with ThreadPoolExecutor(max(1, min(64, len(peers) + len(others)))) as threads:
        answers = threads.map(lambda peer: _reach(peer, secret), peers)
        errors = threads.map(lambda other: _error({**other[0], "port": other[1]}, secret), others)
        found = {peer["name"]: answer for peer, answer in zip(peers, answers)}
        for (peer, port), error in zip(others, errors):
            answer = found[peer["name"]]
            if error:
                answer["closed"][port] = error
            elif answer["error"]:  # this port is open, and the first one is not
                closed = {**answer["closed"], peer["port"]: answer["error"]}
                found[peer["name"]] = _reach({**peer, "port": port}, secret)
                found[peer["name"]]["closed"] = closed
    return found


def _reach(peer: dict[str, Any], secret: str) -> dict[str, Any]:
    port = peer["port"]
    found: dict[str, Any] = {"error": "", "large": "", "source": "", "port": port, "closed": {}}
    try:
        with _connect(peer, secret) as connection:
            found["source"] = connection.getsockname()[0]
            _send(connection, 1)
            try:
                _send(connection, LARGE)
            except OSError as error:
                found["large"] = _reason(error)
    except OSError as error:
        found["error"] = _reason(error)
    return found


def _error(peer: dict[str, Any], secret: str) -> str:
    """Why one port of another host cannot be used, "" if it can."""
    try:
        with _connect(peer, secret) as connection:
            _send(connection, 1)
    except OSError as error:
        return _reason(error)
    return ""


def rate(wanted: dict[str, Any]) -> dict[str, float]:
    """The bytes a second to another host, and the milliseconds of a round trip. Raises OSError."""
    with _connect(wanted["peer"], wanted["secret"]) as connection:
        latency_s = min(_send(connection, 1) for _ in range(_ROUND_TRIPS))
        size = LARGE
        while True:
            seconds = _send(connection, size)
            if seconds >= _LONG_ENOUGH_S or size >= _MOST:
                return {"rate": size / seconds, "latency_ms": 1e3 * latency_s}
            size *= 4


def _connect(peer: dict[str, Any], secret: str) -> socket.socket:
    connection = socket.create_connection((peer["address"], peer["port"]), timeout=CONNECT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(_proof(bytes.fromhex(secret), _read(connection, 32)))
    return connection


def _send(connection: socket.socket, size: int) -> float:
    """The seconds until the other end has `size` bytes."""
    content = bytes(size)
    began = time.perf_counter()
    connection.sendall(_SIZE.pack(size) + content)
    _read(connection, 1)
    return time.perf_counter() - began


def _proof(secret: bytes, nonce: bytes) -> bytes:
    return hmac.new(secret, nonce, hashlib.sha256).digest()


def _read(connection: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        content += _some(connection, size - len(content))
    return content


def _some(connection: socket.socket, most: int) -> bytes:
    content = connection.recv(min(most, 1 << 20))
    if not content:
        raise OSError("the connection was closed")
    return content


def _reason(error: OSError) -> str:
    if isinstance(error, socket.timeout):
        return f"no answer in {CONNECT_S:g} s"
    # A route of the kind "blackhole" is an invalid argument to connect(2).
    is_routed = error.errno not in (errno.EINVAL, errno.ENETUNREACH, errno.EHOSTUNREACH)
    return error.strerror or str(error) if is_routed else "no route"
