"""The messages between a rank and its launcher alone, over the job channel, and the connections beside it.

`mpiddp.protocol.channel` has the lines, the proofs, and what the ranks agree on. TCP connects several hosts.
On one host it is a Unix socket in a folder that only its user can open.

    launcher -> rank   stop, stopping, stacks, end, function, answer
    rank -> launcher   started, joining, mpi_init, log, announce, run_dir, supports_stop,
                        progress, saving, stacks, stopped, failed, exited, done, function, answer

MPIDDP_CONTROL is the launcher's address. MPIDDP_CONTROL_SECRET proves that both ends belong to one job;
the secret itself is never sent. Without these two variables there is no launcher. MPIDDP_ANNOUNCED passes
an earlier attempt's announcement to a restart, see `mpiddp.runtime.reports`.

Each stream of a rank that the launcher shows has a connection of its own. It begins with "output" in
place of "hello". After "received", the rank's agent sends frames, see `FRAME`. Over one that begins with
"input", rank 0 gets the launcher's stdin.

A rank's script is a process of its own, with a second connection. "stopping" tells the rank that its script
has got a "stop". The script of `mpiddp.spawn` asks for its "function", and sends its "answer", see
`mpiddp.launch.exchange`.
"""

from __future__ import annotations

import json
import socket
import struct
from pathlib import Path
from typing import Any

LINE_LIMIT = 512 * 1024  # bytes; a longer line ends the connection
# What a script says of its training: values, and characters of a name or a text of them.
MOST_SHOWN, LONGEST_SHOWN = 16, 64
SHOWN_BYTES = 2500  # of one message, which is ASCII: a letter of another alphabet takes up to 12
LARGEST_WHOLE = (1 << 63) - 1
TEXT_LIMIT = 16 * 1024  # characters of a text; one may take 12 bytes in JSON

# A frame of a rank's output: the number of bytes that follow. They end with a whole line, or they are all
# that there is of a line that has been open for OPEN_S, or a part of a line longer than LONGEST_LINE.
FRAME = struct.Struct("!I")
OPEN_S = 0.2
LONGEST_LINE = 2 << 20  # bytes

# What begins a connection that the control server does not read itself.
INPUT = "input"
HANDED_OVER = ("output", INPUT)
VIEWS = (VIEW_JOB, VIEW_STACKS) = ("view_job", "view_stacks")  # what viewers ask for
GO = b"\n"  # what the reader of stdin sends
STREAMS = {1: "stdout", 2: "stderr"}
OUTPUT_PROCESS = "mpiddp-output"  # the name of each rank's output process; at most 15 characters
DEFAULT_RANKS = "default"  # stdout of rank 0, stderr of all ranks

UNPROVED_LINE_LIMIT = 1024  # bytes of the line that proves that a connection belongs to the job
UNIX = "unix:"  # prefix of an address that is a path

# The phases of a step of `mpiddp train`, in this order.
PHASES = ("data", "forward", "backward", "waiting", "optimizer")

_NUMBER, _MAYBE = (int, float), (int, type(None))
# The messages that a rank may send, with their required fields and types. The first four are those of every
# job channel.
MESSAGES: dict[str, dict[str, Any]] = {
    "gather": {"key": str, "timeout_s": (int, float, type(None))},
    "claim": {"key": str},
    "fail": {"code": int},
    "leave": {},
    "started": {"host": str, "pid": int},
    "joining": {"timeout_s": _NUMBER},
    "mpi_init": {"active": bool},  # begins, or has succeeded
    "log": {"path": str},  # of the file that will contain a traceback
    "announce": {"resume_args": list, "global_batch_size": _MAYBE, "max_ranks": _MAYBE},
    "run_dir": {"path": str},  # a restart waits until it is there
    "supports_stop": {},
    # With totals of the thread that makes the steps (`own_s`, in which it ran or waited for a core) and of
    # its process: seconds, and bytes. Then, if it is new, `shown`: what the script says of its training, by
    # name; and `phases`: the number of its "steps", and the seconds that all have spent in each phase.
    "progress": {"step": int, "own_s": _NUMBER, "cpu_s": _NUMBER, "memory": int},
    "saving": {"active": bool},  # begins, or has ended
    # `state` of the main thread, as in /proc.
    "stacks": {"text": str, "step": int, "cpu_s": _NUMBER, "state": str},
    "stopped": {},
    # `is_verdict`: `error` names the culprit, which may be another rank. Then, if there is one, `signal`: the
    # number of the signal that killed it; and, if the kernel has killed for lack of memory, `oom_kills`, how
    # often, and `memory_limit`: in bytes, or None.
    "failed": {"code": int, "error": str, "traceback": str, "is_verdict": bool},
    "function": {},  # it asks for that of `mpiddp.spawn`
    "answer": {"is_result": bool, "mac": str},  # and its pickle as the value
    "exited": {},  # with code 0, but without leaving the job
    "done": {},
}


def is_shown(selection: str, rank: int, stream: int) -> bool:
    """Whether the launcher shows this stream of a rank: by "default", "all", "none", or ranks, "0,5"."""
    if selection == DEFAULT_RANKS:
        return rank == 0 or stream == 2
    if selection in ("all", "none"):
        return selection == "all"
    return str(rank) in selection.split(",")


def is_short(name: str, value: object) -> bool:
    """Whether this is a number or a short text, with a short name."""
    is_number = type(value) is float or (type(value) is int and abs(value) <= LARGEST_WHOLE)
    is_text = type(value) is str and len(value) <= LONGEST_SHOWN
    return len(name) <= LONGEST_SHOWN and (is_number or is_text)


def is_valid(kind: str, facts: dict[str, Any]) -> bool:
    """Whether a rank may send this message: its kind, its fields and their types.

    Only a process of the job can send it, so this finds errors, no attacks.
    """
    fields = MESSAGES.get(kind)
    return fields is not None and all(
        isinstance(facts.get(name, facts), types) for name, types in fields.items()
    )


def notice_silence(connection: socket.socket, *, is_read_slowly: bool = False) -> None:
    """Make the kernel end the connection 12 s after the other host stops answering.

    The protocol has no heartbeat: a rank that imports torch, or computes, could not send one. Both ends of
    a Unix socket are on one host.

    is_read_slowly: the other end may read nothing for long, which is no silence. TCP_USER_TIMEOUT takes it
    for one.
    """
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 4),
        (socket.TCP_KEEPINTVL, 2),
        (socket.TCP_KEEPCNT, 4),
        (socket.TCP_USER_TIMEOUT, 0 if is_read_slowly else 12_000),  # ms
        (socket.TCP_NODELAY, 1),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def recorded_error(path: str) -> str:
    """The error in the file that torch.distributed's `@record` writes, "" if there is none.

    https://docs.pytorch.org/docs/stable/elastic/errors.html
    """
    from mpiddp.paths import read_limited  # a script needs none of it

    try:
        recorded = json.loads(read_limited(Path(path), LINE_LIMIT))["message"]
        return str(recorded["message"] if isinstance(recorded, dict) else recorded)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return ""
