"""Bytes that only the job can have written: the function of `mpiddp.spawn`, and what each rank answers.

A payload is a JSON object and a body, behind their sizes and a MAC. Whoever receives it checks the MAC before
anything is unpickled, so no stranger on the network can run code by it. Between `mpiddp.spawn` and its own
launcher, which share a private pair of sockets, the key is "" and the MAC a checksum.
"""

from __future__ import annotations

import json
import socket
import struct
from _blake2 import blake2b  # hashlib would load OpenSSL, see `mpiddp.protocol.channel`
from typing import Any, NamedTuple

TO_LAUNCHER, TO_CALLER = "to the launcher", "to the caller"  # purposes

_SIZES = struct.Struct("!IQ")  # bytes of the facts, bytes of the body
_MAC_BYTES = 32
_FACTS_LIMIT = 16 << 20  # bytes
_AT_ONCE = 1 << 20  # bytes; memory is taken for what has arrived, not for what is announced


class Payload(NamedTuple):
    """`facts` are plain JSON, `body` is opaque: a pickle."""

    facts: dict[str, Any]
    body: bytes | bytearray = b""


def send_payload(connection: socket.socket, payload: Payload, key: str, purpose: str) -> None:
    """Send a payload over a connection that blocks.

    Args:
        key: the secret that both ends have, at most 64 bytes.
        purpose: what the payload is for. The receiver names the same, so that no payload passes for another.

    Raises:
        OSError: the connection has ended.
    """
    facts = json.dumps(payload.facts).encode()
    sizes = _SIZES.pack(len(facts), len(payload.body))
    connection.sendall(sizes + _mac(key, purpose, sizes, facts, payload.body) + facts)
    if payload.body:  # the reader of none may have left by now
        connection.sendall(payload.body)


def receive_payload(
    connection: socket.socket, key: str, purpose: str, *, limit: int | None = None
) -> Payload:
    """Receive a payload over a connection that blocks.

    Args:
        key, purpose: those of the sender.
        limit: the most bytes that the body may have, None for any number.

    Raises:
        OSError: the connection has ended.
        ValueError: it is too large, or its sender does not have the key.
    """
    sizes = bytes(_receive(connection, _SIZES.size))
    facts_size, body_size = _SIZES.unpack(sizes)
    if facts_size > _FACTS_LIMIT or (limit is not None and body_size > limit):
        raise ValueError("a payload that is too large")
    mac = bytes(_receive(connection, _MAC_BYTES))
    facts, body = _receive(connection, facts_size), _receive(connection, body_size)
    # The time of this comparison reveals nothing: a wrong MAC ends the connection.
    if mac != _mac(key, purpose, sizes, facts, body):
        raise ValueError("a payload with a wrong MAC")
    return Payload(json.loads(facts), body)


def _mac(key: str, purpose: str, *parts: bytes | bytearray) -> bytes:
    mac = blake2b(f"{len(purpose)} {purpose}".encode(), key=key.encode(), digest_size=_MAC_BYTES)
    for part in parts:
        mac.update(part)
    return mac.digest()


def _receive(connection: socket.socket, size: int) -> bytearray:
    """The next `size` bytes."""
    received = bytearray()
    while len(received) < size:
        chunk = connection.recv(min(size - len(received), _AT_ONCE))
        if not chunk:
            raise ConnectionError("the other end has closed the connection")
        received += chunk
    return received
