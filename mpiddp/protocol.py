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
from _blake2 import blake2b  # not by way of hashlib, see `proof`
from dataclasses import dataclass

ADDRESS, SECRET, JOB = "MPIDDP_CONTROL", "MPIDDP_CONTROL_SECRET", "MPIDDP_JOB"
PLACEMENT, NETWORKS, INTERFACE = "MPIDDP_PLACEMENT", "MPIDDP_NETWORKS", "MPIDDP_INTERFACE"
TIMEOUT, LAUNCHED_AT = "MPIDDP_TIMEOUT", "MPIDDP_LAUNCHED_AT"
REPORT, VERBOSE, DATA = "MPIDDP_REPORT", "MPIDDP_VERBOSE", "MPIDDP_DATA"
ANNOUNCED = "MPIDDP_ANNOUNCED"


@dataclass(frozen=True)
class Variable:
    """An environment variable of this project, in words for docs/environment.md."""

    name: str
    set_by: str
    read_by: str
    holds: str


# Every one that there is. tests/test_environment.py finds those that are missing here.
VARIABLES = (
    Variable(
        INTERFACE,
        "the user, or `launch --interface`",
        "every rank",
        "the network of the job's own traffic: an interface's name, an address, or a network such as "
        "10.0.0.0/24; several with commas",
    ),
    Variable(
        TIMEOUT,
        "the user, or `launch --timeout`",
        "every rank",
        "how many seconds the ranks may take to join (60)",
    ),
    Variable(DATA, "the user", "`train`, `bench`", "the folder of data sets, as `--data-dir` does"),
    Variable("MPIDDP_PYTHON", "the user", "`run.sh`", "the Python to build on, with its torch"),
    Variable(
        "MPIDDP_MPIRUN", "the user", "`run.sh`", "the mpirun to use instead of Open MPI's wheel"
    ),
    Variable(
        PLACEMENT,
        "`launch`",
        "every rank",
        "the hosts that the hostfile names, with their ranks: node1:4,node2:2",
    ),
    Variable(
        NETWORKS,
        "`launch`",
        "every rank",
        "the networks that lead to the other hosts, unless an interface is named",
    ),
    Variable(REPORT, "`launch --report`", "every rank", "1: rank 0 prints where each rank is"),
    Variable(
        VERBOSE,
        "`launch -v`",
        "every rank",
        "1: print the master address, each rank's interface, and the time of the first all-reduce",
    ),
    Variable(
        LAUNCHED_AT, "`launch`", "every rank", "when the command was given, in seconds since 1970"
    ),
    Variable(
        ANNOUNCED,
        "`launch`, at a restart",
        "every rank, through `mpiddp.runtime.announcement.announced`",
        "what an earlier attempt announced, as JSON: global_batch_size, world_size",
    ),
    Variable(JOB, "`launch`", "`launch`", "the job's id, by which it finds what is left of a job"),
    Variable(
        ADDRESS,
        "`launch`",
        "every rank, which removes it",
        "where the launcher listens to the ranks: ADDRESS:PORT",
    ),
    Variable(
        SECRET,
        "`launch`",
        "every rank, which removes it",
        "what proves that a rank belongs to the job, as hex digits",
    ),
)
URGENT = b"!"  # in no word of a launcher's
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
    # A keyed BLAKE2 is a MAC. Python's own stands in `_blake2`: hashlib would load OpenSSL besides, 3.7 MB
    # (CPython 3.10 to 3.14 on Linux) of a launcher's 12 MB. tests/test_still_needed.py watches this.
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


def variables_table() -> str:
    """The table of docs/environment.md, which `python -m mpiddp.protocol` prints."""
    head = "| variable | set by | read by | holds |\n|---|---|---|---|\n"
    rows = (f"| `{v.name}` | {v.set_by} | {v.read_by} | {v.holds} |\n" for v in VARIABLES)
    return head + "".join(rows)


if __name__ == "__main__":
    print(variables_table(), end="")
