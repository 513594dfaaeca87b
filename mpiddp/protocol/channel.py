"""The job channel: what a rank and the server of its job send each other, over one connection.

`mpiddp launch` serves it. Where no launcher listens (a raw mpirun, srun, torchrun), a process beside rank 0
does, see `mpiddp.runtime.rendezvous.channel_process`. TCP connects several hosts. On one host it is a Unix
socket in a folder that only its user can open. A message is a line: a JSON object with its type, and, after
a TAB, a value that only ranks read. The server passes values on as they are, and parses none. It pushes all
news, so nobody polls.

    server -> member   challenge, received, taken, called, gathered, no_answer, claimed, failed
    member -> server   hello, gather, claim, fail, leave
    launcher -> rank   stop, stacks, calls, size, end, hold, again, function, answer
    rank -> launcher   those of MESSAGES

Both ends prove that they have the member's key, which is never sent: the member by the server's challenge,
the server by the member's. It is derived from the job's key for one rank and one role, so a script, which has
its own in MPIDDP_CHANNEL_SECRET, can speak for nobody else. MPIDDP_CONTROL is the launcher's address, and
MPIDDP_CONTROL_SECRET the job's key, which only agents have. Without these two there is no launcher.

Each stream of a rank that the launcher shows has a connection of its own. It begins with "output" in place of
"hello", and has the bytes of the stream after "received". Over one that begins with "input", rank 0 gets the
launcher's stdin.

A rank's script is a process of its own, with a second connection. "stop" has the signal that the launcher has
got, and goes to the script once that is connected. The script of `mpiddp.spawn` asks for its "function", and
sends its "answer", see `mpiddp.launch.run.control.Exchange`.

After a failure the launcher may "hold" the ranks: each ends its script, says that it is "held", and waits.
"again" begins the next attempt, in which it connects anew, with a key derived from the last one.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import struct
from _blake2 import blake2b  # hashlib would load OpenSSL, see `mac`
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# Who a member is: a rank, which `mpiddp run` or the process itself speaks for, the script of a rank, or a
# host that only tries, before the ranks start, whether it reaches the launcher.
RANK, SCRIPT, HOST = "rank", "script", "host"

VALUE_LIMIT = 64 << 20  # bytes of a line with a value
CHUNK = 1 << 16  # bytes that are read at once
_TAB, _LINE_END = b"\t", b"\n"
_CONSEQUENCE = re.compile(r"connection|by peer|broken pipe|gloo|nccl|store|socket", re.IGNORECASE)
_PARSER = json.JSONDecoder()

LINE_LIMIT = 512 * 1024  # bytes; a longer line ends the connection
LARGEST_WHOLE = (1 << 63) - 1
TEXT_LIMIT = 16 * 1024  # characters of a text; one may take 12 bytes in JSON

# What begins a connection that the control server does not read itself.
INPUT = "input"
HANDED_OVER = ("output", INPUT)
VIEWS = (VIEW_JOB, VIEW_STACKS) = ("view_job", "view_stacks")  # what viewers ask for
VIEWED_AT = "job"  # the socket for viewers, in a folder of its own
NAMED_AT = "name"  # the job's name, in a file beside it
STREAMS = {1: "stdout", 2: "stderr"}
# The names of a rank's agent, of a Python that waits for the next attempt, and of the process that serves
# torch's store: at most 15 characters.
AGENT_NAME, SPARE_NAME, STORE_NAME = "mpiddp-agent", "mpiddp-spare", "mpiddp-store"
DEFAULT_RANKS = "default"  # stdout of rank 0, stderr of all ranks

# The errors of a line that is not a message, and of an address that is none.
NO_MESSAGE = (ValueError, LookupError, TypeError, RecursionError, OverflowError)
UNPROVED_LINE_LIMIT = 1024  # bytes of the line that proves that a connection belongs to the job
UNIX = "unix:"  # prefix of an address that is a path

_PROBES = 100  # of a silent host, before the kernel ends a connection; at most 127
# The beginning of the kernel's struct tcp_info, up to tcpi_last_data_recv and tcpi_last_ack_recv.
_TCP_INFO = struct.Struct("8x13I")

_NUMBER, _MAYBE = (int, float), (int, type(None))
# The messages that a rank may send, with their required fields and types. The first four are those of every
# job channel.
MESSAGES: dict[str, dict[str, Any]] = {
    "gather": {"key": str, "timeout_s": (int, float, type(None))},
    "claim": {"key": str},
    "fail": {"code": int},
    "leave": {},
    # Then `outputs`, the pipes or terminals that its script writes to: see `key_of_output` in
    # `mpiddp.hosts.processes`.
    "started": {"host": str, "pid": int},
    "joining": {"timeout_s": _NUMBER},
    "log": {"path": str},  # of the file that will contain a traceback
    "announce": {"resume_args": list, "global_batch_size": _MAYBE, "max_ranks": _MAYBE},
    "run_dir": {"path": str},  # a restart fails if it is gone
    "supports_stop": {},
    # With totals of the thread that makes the steps (`own_s`, in which it ran or waited for a core) and of
    # its process: seconds, and bytes. Then, if it is new, `shown`: what the script says of its training, by
    # name.
    "progress": {"step": int, "own_s": _NUMBER, "cpu_s": _NUMBER, "memory": int},
    "saving": {"active": bool},  # begins, or has ended
    "saved": {"path": str},  # of a checkpoint that is complete
    "stacks": {"text": str},
    # Of torch's collectives, by the rank's own clock: see `mpiddp.runtime.collectives`.
    "calls": {"now_us": int, "groups": list},
    # For each rank of its host whose GPU is known: the rank, and the fields CHANGING of `mpiddp.hosts.gpus`.
    "gpus": {"ranks": list},
    "stopped": {},
    "terminal": {"echo": bool, "lines": bool},  # what rank 0's script has set of it
    # `is_verdict`: `error` names the culprit, which may be another rank. Then, if there is one, `signal`: the
    # number of the signal that killed it, and `passed` if its agent had got it; and, if the kernel has killed
    # for lack of memory, `oom_kills`, how often, and `memory_limit`: in bytes, or None.
    "failed": {"code": int, "error": str, "traceback": str, "is_verdict": bool},
    "function": {},  # it asks for that of `mpiddp.spawn`
    "answer": {"is_result": bool, "mac": str},  # and its pickle as the value
    "held": {"error": str},  # its script has ended, and what is wrong with its host
    "exited": {},  # with code 0, but without leaving the job
    "done": {},
}


def encode(kind: str, value: bytes = b"", **facts: object) -> bytes:
    """The line of a message. `value` is JSON without line ends, as json.dumps makes it."""
    head = json.dumps({"type": kind, **facts}).encode()
    # One copy: the result of a function of `mpiddp.spawn` may have gigabytes.
    return b"".join((head, _TAB, value, _LINE_END)) if value else head + _LINE_END


def decode(line: bytes) -> tuple[dict[str, Any], bytes]:
    """The facts of a message, with its type, and its value, or b"". Raises ValueError or RecursionError."""
    head, _, value = line.partition(_TAB)
    if len(head) > LINE_LIMIT:
        raise ValueError("too long")
    text = head.decode()
    facts, end = _PARSER.raw_decode(text)  # json.loads takes twice as long: it guesses the encoding
    if end != len(text) or type(facts) is not dict or type(facts.get("type")) is not str:
        raise ValueError("not a message")
    return facts, value


def introduce(
    connection: socket.socket, own_key: str, kind: str, rank: int, facts: Mapping[str, object]
) -> dict[str, Any]:
    """Answer the server's challenge by a message of this kind, and return what the server answers.

    Both sides prove that they have the member's key. Raises one of NO_MESSAGE if another program answers, or
    the server of another job, and OSError if the connection ends or does not answer within its timeout.
    """
    challenge = _next(connection)["challenge"]
    own_challenge = os.urandom(16).hex()
    proof = mac(own_key, f"member {challenge}")
    connection.sendall(encode(kind, b"", rank=rank, challenge=own_challenge, proof=proof, **facts))
    answer = _next(connection)
    # A rank that has a script already gets "taken", without a proof.
    has_proof = answer.get("proof") == mac(own_key, f"server {own_challenge}")
    if answer["type"] != "taken" and not (answer["type"] == "received" and has_proof):
        raise ValueError("no proof")
    return answer


def _next(connection: socket.socket) -> dict[str, Any]:
    """The next message. What follows it is left to the connection's owner."""
    with connection.makefile("rb", buffering=0) as lines:
        line = lines.readline(UNPROVED_LINE_LIMIT)
    if not line.endswith(b"\n"):
        raise ConnectionResetError("the connection has ended")
    return decode(line[:-1])[0]


def member_key(key: str, role: str, rank: int) -> str:
    """The key of one member, from the job's."""
    return mac(key, f"{role} {rank}")


def next_key(key: str) -> str:
    """The job's key in the next attempt of the same agents."""
    return mac(key, "the next attempt")


def mac(key: str, purpose: str, value: bytes = b"") -> str:
    """The proof that a member of the job has made this value for this purpose: its reader unpickles it."""
    # A keyed BLAKE2 is a MAC. Python's own is in `_blake2`; hashlib would also load OpenSSL, 3.7 MB
    # (CPython 3.10 to 3.14 on Linux) of a launcher's 12 MB. test_still_needed.py checks this.
    made = blake2b(f"{purpose}\n".encode(), key=key.encode(), digest_size=32)
    made.update(value)
    return made.hexdigest()


def listed(values: Mapping[int, bytes]) -> bytes:
    """The JSON of the values of all ranks: the most frequent one once, and the others by rank."""
    # Most values are equal on all ranks, and the answer goes to every rank.
    [(usual, _)] = Counter(values.values()).most_common(1)
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
            self._open += lines[0]
            lines[0] = bytes(self._open)
            self._open.clear()
        self._open += rest
        if len(self._open) > self.limit or any(len(line) > self.limit for line in lines):
            raise ValueError("a line that is too long")
        return lines


def messages_over(connection: socket.socket) -> Iterator[tuple[dict[str, Any], bytes]]:
    """The messages between the caller of `mpiddp.spawn` and its launcher, each with its value, to the end."""
    lines = Lines(1 << 62)  # no limit, between the caller and its own launcher
    while chunk := connection.recv(1 << 20):
        for line in lines.split(chunk):
            yield decode(line)


def state_folder() -> Path:
    """Where a launcher keeps what a later login is to find. Not absolute without a home folder."""
    folder = os.environ.get("XDG_STATE_HOME", "")
    parent = folder if folder.startswith("/") else os.path.expanduser("~/.local/state")  # noqa: PTH111
    return Path(parent, "mpiddp")


def viewed_folders() -> list[Path]:
    """The beginnings of the paths of the folders in which the launchers of this user listen for viewers.

    Machines may share the first. Not in XDG_RUNTIME_DIR, which logind removes at a user's last logout.
    """
    state = state_folder()
    of_host = [state / socket.gethostname() / "job-"] if state.is_absolute() else []
    return [*of_host, Path(f"/tmp/mpiddp-job-{os.getuid()}-")]


def is_shown(selection: str, rank: int, stream: int) -> bool:
    """Whether the launcher shows this stream of a rank: by "default", "all", "none", or ranks, "0,5"."""
    if selection == DEFAULT_RANKS:
        return rank == 0 or stream == 2
    return selection == "all" or str(rank) in selection.split(",")


def is_consequence(error: str) -> bool:
    """Whether a rank reports such an error when another rank has ended."""
    return bool(_CONSEQUENCE.search(error))


def is_valid(kind: str, facts: dict[str, Any]) -> bool:
    """Whether a rank may send this message. Only a process of the job can: this finds errors, no attacks."""
    fields = MESSAGES.get(kind)
    return fields is not None and all(
        isinstance(facts.get(name, facts), types) for name, types in fields.items()
    )


def notice_silence(
    connection: socket.socket, patience_s: float, *, is_read_slowly: bool = False
) -> None:
    """Make the kernel end the connection once the other host has been silent for this long.

    The kernel asks, because the protocol has no heartbeat: a rank that imports torch, or computes, could not
    send one. Both ends of a Unix socket are on one host.

    is_read_slowly: the other end may read nothing for long. This is no silence, but TCP_USER_TIMEOUT would
    take it for one.
    """
    if connection.family == socket.AF_UNIX:
        return
    interval_s = math.ceil(patience_s / _PROBES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, interval_s),
        (socket.TCP_KEEPINTVL, interval_s),
        (socket.TCP_KEEPCNT, _PROBES),
        (socket.TCP_USER_TIMEOUT, 0 if is_read_slowly else round(patience_s * 1000)),
        (socket.TCP_NODELAY, 1),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def silence_s(connection: socket.socket) -> float:
    """For how long nothing has come from the other host, not even the kernel's acknowledgements."""
    if connection.family == socket.AF_UNIX:
        return 0.0
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    *_, data_ms, acknowledgement_ms = _TCP_INFO.unpack(info)
    return float(min(data_ms, acknowledgement_ms) / 1000)
