"""The control channel between a rank and its launcher, for both of its ends: JSON lines over TCP.

    launcher -> rank   challenge, stop, stacks, end; one urgent byte
    rank -> launcher   hello, started, joining, log, announce, supports_stop, progress, stacks, stopped,
                        failed, done

MPIDDP_CONTROL says where the launcher listens, MPIDDP_CONTROL_SECRET proves that both belong to one
job; the secret itself never crosses the wire. Without these two there is no channel. MPIDDP_ANNOUNCED
hands a restart what an earlier attempt has announced, see `mpiddp.runtime.announcement`.
"""

from __future__ import annotations

import json
import socket
from _blake2 import blake2b

ADDRESS, SECRET, JOB = "MPIDDP_CONTROL", "MPIDDP_CONTROL_SECRET", "MPIDDP_JOB"
ANNOUNCED = "MPIDDP_ANNOUNCED"
URGENT = b"!"  # in no message of a launcher
LINE_LIMIT = 512 * 1024  # bytes; a longer line ends the connection
TEXT_LIMIT = 16 * 1024  # characters of a text; JSON may need 12 bytes for one

# What a rank may say, and what has to stand in it.
MESSAGES: dict[str, dict[str, tuple[type, ...]]] = {
    "started": {"host": (str,), "pid": (int,)},
    "joining": {"timeout_s": (int, float)},
    "log": {"path": (str,)},  # where a traceback will be found
    "announce": {
        "resume_args": (list,),
        "global_batch_size": (int, type(None)),
        "max_ranks": (int, type(None)),
    },
    "supports_stop": {},
    "progress": {"step": (int,)},
    "stacks": {"text": (str,), "step": (int,)},
    "stopped": {},
    "failed": {
        "code": (int,),
        "error": (str,),
        "traceback": (str,),
        "first": (bool, type(None)),
    },
    "done": {},
}


def dumps(kind: str, **facts: object) -> bytes:
    return json.dumps({"type": kind, **facts}).encode() + b"\n"


def proof(secret: str, challenge: str, rank: int) -> str:
    """What only somebody who has the secret can answer to `challenge`."""
    # A keyed BLAKE2 is a MAC. By way of hashlib it would load OpenSSL, which is 4 MB.
    return blake2b(f"{challenge} {rank}".encode(), key=secret.encode()).hexdigest()


def notice_silence(connection: socket.socket) -> None:
    """Let the kernel end the connection 12 s after the other host has fallen silent.

    Not a heartbeat of our own: a rank that imports torch, or computes, cannot send one.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 4),
        (socket.TCP_KEEPINTVL, 2),
        (socket.TCP_KEEPCNT, 4),
        (socket.TCP_USER_TIMEOUT, 12_000),  # ms
        (socket.TCP_NODELAY, 1),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
