"""The job channel: what a rank and the server of its job send each other, over one connection.

`mpiddp launch` serves it. Where no launcher listens (a raw mpirun, srun, torchrun), a process beside rank 0
does, see `mpiddp.runtime.rendezvous.channel_process`. A message is a line: a JSON object with its type, and,
after a TAB, a value that only ranks read. The server passes values on as they are, and parses none. It pushes
all news, so nobody polls.

    server -> member   challenge, received, taken, called, gathered, no_answer, claimed, failed, lost
    member -> server   hello, gather, claim, fail, leave

`mpiddp.protocol.messages` has the messages between a rank and a launcher alone, which use the same lines.

Both ends prove that they have the job's key, which is never sent: the member by the server's challenge, the
server by the member's. A MAC covers who speaks, so that no proof passes for another one.
"""

from __future__ import annotations

import json
import os
from _blake2 import blake2b  # hashlib would load OpenSSL, see `_mac`
from collections.abc import Mapping
from typing import Any

from mpiddp.protocol.messages import LINE_LIMIT

# Who a member is: a rank, which `mpiddp run` or the process itself speaks for, or the script of a rank.
RANK, SCRIPT = "rank", "script"
_SERVER = "server"

VALUE_LIMIT = 64 << 20  # bytes of a line with a value
CHUNK = 1 << 16  # bytes that are read at once
_TAB, _LINE_END = b"\t", b"\n"
_PARSER = json.JSONDecoder()


def encode(kind: str, value: bytes = b"", **facts: object) -> bytes:
    """The line of a message. `value` is JSON without line ends, see `encode_value`."""
    head = json.dumps({"type": kind, **facts}).encode()
    return head + _TAB + value + _LINE_END if value else head + _LINE_END


def encode_value(value: object) -> bytes:
    return json.dumps(value).encode()


def decode(line: bytes) -> tuple[dict[str, Any], bytes]:
    """The facts of a message, with its type, and its value, b"" if it has none.

    Raises ValueError or RecursionError if it is not a message.
    """
    head, _, value = line.partition(_TAB)
    if len(head) > LINE_LIMIT:
        raise ValueError("too long")
    text = head.decode()
    facts, end = _PARSER.raw_decode(text)  # json.loads takes twice as long: it guesses the encoding
    if end != len(text) or type(facts) is not dict or type(facts.get("type")) is not str:
        raise ValueError("not a message")
    return facts, value


def introduction(
    key: str, challenge: str, kind: str, rank: int, facts: Mapping[str, object]
) -> tuple[bytes, str]:
    """The line by which a member answers the server's challenge, and the proof that the server then owes."""
    own_challenge = os.urandom(16).hex()
    proof = member_proof(key, challenge, str(facts.get("role", RANK)), rank)
    line = encode(kind, b"", rank=rank, challenge=own_challenge, proof=proof, **facts)
    return line, _mac(key, f"{_SERVER} {own_challenge}")


def check_introduction(key: str, challenge: str, facts: Mapping[str, Any]) -> tuple[str, str]:
    """The role of the member that introduces itself so, and the proof that the server owes it.

    Raises ValueError, LookupError or TypeError if it does not belong to the job.
    """
    role = facts.get("role", RANK) if facts["type"] == "hello" else RANK
    if role not in (RANK, SCRIPT):
        raise ValueError(role)
    # The time of this comparison reveals nothing: every connection has another challenge.
    if facts["proof"] != member_proof(key, challenge, role, facts["rank"]):
        raise ValueError("no proof")
    return role, _mac(key, f"{_SERVER} {facts['challenge']}")


def member_proof(key: str, challenge: str, role: str, rank: int) -> str:
    return _mac(key, f"{role} {rank} {challenge}")


def value_mac(key: str, purpose: str, value: bytes) -> str:
    """The proof that a member of the job has made this value, which its reader unpickles.

    No value passes for one of another purpose.
    """
    return _mac(key, f"{purpose}\n", value)


def _mac(key: str, text: str, value: bytes = b"") -> str:
    # A keyed BLAKE2 is a MAC. Python's own is in `_blake2`; hashlib would also load OpenSSL, 3.7 MB
    # (CPython 3.10 to 3.14 on Linux) of a launcher's 12 MB. test_still_needed.py checks this.
    mac = blake2b(text.encode(), key=key.encode(), digest_size=32)
    mac.update(value)
    return mac.hexdigest()


def listed(values: Mapping[int, bytes]) -> bytes:
    """The JSON of the values of all ranks: the most frequent one once, and the others by rank.

    Most values are equal on all ranks, and the answer goes to every rank.
    """
    counts: dict[bytes, int] = {}
    for value in values.values():
        counts[value] = counts.get(value, 0) + 1
    usual = max(counts, key=counts.__getitem__)
    others = [
        b'"%d": %b' % (rank, values[rank]) for rank in sorted(values) if values[rank] != usual
    ]
    return b'{"usual": %b, "others": {%b}}' % (usual, b", ".join(others))


def unlisted(value: bytes, world_size: int) -> list[Any]:
    """The values of all ranks, by rank: [world_size]."""
    values = json.loads(value)
    usual, others = values["usual"], values["others"]
    return [others.get(str(rank), usual) for rank in range(world_size)]


class Lines:
    """Splits a stream into lines, each at most `limit` bytes long. Its time is linear in their bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._open = bytearray()  # the line that has not ended yet

    def split(self, chunk: bytes) -> list[bytes]:
        """The lines that end in this chunk. Raises ValueError if a line is too long."""
        *lines, rest = chunk.split(_LINE_END)
        if lines and self._open:
            lines[0] = bytes(self._open) + lines[0]
            self._open.clear()
        self._open += rest
        if len(self._open) > self.limit or any(len(line) > self.limit for line in lines):
            raise ValueError("a line that is too long")
        return lines
