"""The job channel: the messages between a rank and the server of its job.

`mpiddp launch` is the server. Under a raw mpirun, srun or torchrun, a process beside rank 0 is the server
(`mpiddp.runtime.rendezvous.channel_process`). Several hosts use TCP. One host uses a Unix socket in a folder
that only its user can open. A message is a line: a JSON object with its type, and, after a TAB, a value that
only ranks read. The server passes values on without parsing them.

    server -> member   challenge, received, taken, called, gathered, no_answer, claimed, failed
    member -> server   hello, gather, claim, fail, leave
    launcher -> rank   stop, stacks, calls, size, end, hold, again, function, answer
    rank -> launcher   see MESSAGES

Each end proves by the challenge of the other end that it has the member's key, which is never sent. The key
is derived from the job's key for one rank and one role, so a script, which has its key in
MPIDDP_CHANNEL_SECRET, cannot speak for another member. Only agents have the job's key, in their orders
(`mpiddp.protocol.orders`). From then on, each line begins with a seal (`Seal`), so nobody on the way can
write, change, repeat or leave out one.

Each stream of a rank that the launcher shows has its own connection. It begins with "output" in place of
"hello", and carries the bytes of the stream after "received". A connection that begins with "input" brings
rank 0 the launcher's stdin.

A rank's script is a process of its own, with a second connection once it needs one. "stop" has the signal
that the launcher has received. The script of `mpiddp.spawn` asks for its "function", and sends its "answer",
see `mpiddp.launch.run.control.Exchange`.

After a failure, the launcher may "hold" the ranks: each agent ends its script, says "held", and waits.
"again" begins the next attempt, for which the agent connects anew with a key derived from the last one.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

# The roles of members: a rank, for which its agent or the process itself speaks; the script of a rank; and a
# host that tries, before the ranks start, whether it reaches the launcher.
RANK, SCRIPT, HOST = "rank", "script", "host"

VALUE_LIMIT = 64 << 20  # bytes of a line with a value
CHUNK = 1 << 16  # bytes that are read at once
_TAB, _LINE_END = b"\t", b"\n"
_SEAL = 32  # hexadecimal digits
_PARSER = json.JSONDecoder()

LINE_LIMIT = 512 * 1024  # bytes; a longer line ends the connection
LARGEST_WHOLE = (1 << 63) - 1
TEXT_LIMIT = 16 * 1024  # characters of a text; a character may take 12 bytes in JSON

# These request a stop: LSF sends SIGUSR2 at a job's limit, and Grid Engine's -notify before a suspension.
STOP_SIGNALS = (*(signal.SIGINT, signal.SIGTERM, signal.SIGHUP), *(signal.SIGUSR1, signal.SIGUSR2))

# The first messages of connections that the server hands over to its owner.
INPUT = "input"
HANDED_OVER = ("output", INPUT)
VIEWS = (VIEW_JOB, VIEW_STACKS) = ("view_job", "view_stacks")  # the questions of viewers
VIEWED_AT = "job"  # the socket for viewers, in a folder of its own
NAMED_AT = "name"  # the file with the job's name, in the same folder
STREAMS = {1: "stdout", 2: "stderr"}
# The names of a rank's agent, of a Python that waits for the next attempt, of the process that serves torch's
# store, and of one that ends a container. The kernel keeps 15 characters.
AGENT_NAME, SPARE_NAME, STORE_NAME, REMOVER_NAME = (
    "mpiddp-agent",
    "mpiddp-spare",
    "mpiddp-store",
    "mpiddp-remover",
)
DEFAULT_RANKS = "default"  # stdout of rank 0, stderr of all ranks

# The errors of a line that is not a message, and of a wrong address.
NO_MESSAGE = (ValueError, LookupError, TypeError, RecursionError, OverflowError)
UNPROVED_LINE_LIMIT = 1024  # bytes of the line that proves that a connection belongs to the job
UNIX = "unix:"  # the prefix of an address that is a path

_PROBES = 100  # of a silent host, before the kernel ends a connection; at most 127
_LONGEST_INTERVAL_S, _LONGEST_MS = 32_767, 2**31 - 1  # that the kernel accepts
# The bytes of the kernel's struct tcp_info up to tcpi_last_data_recv and tcpi_last_ack_recv.
_TCP_INFO = 60

_NUMBER, _MAYBE = (int, float), (int, type(None))
# The messages of a rank, with their required fields and types. Without a launcher, it sends the first four.
MESSAGES: dict[str, dict[str, Any]] = {
    "gather": {"key": str, "timeout_s": (int, float, type(None))},
    "claim": {"key": str},  # to have failed first. `like` is equal for equal errors of two ranks
    "fail": {"code": int},
    "leave": {},
    # It may have `outputs`, the pipes or terminals to which the script writes: see `key_of_output` in
    # `mpiddp.hosts.processes`.
    "started": {"host": str, "pid": int},
    "joining": {
        "timeout_s": _NUMBER
    },  # it has `script`, the PID of the script, unless a command is to start
    "log": {"path": str},  # of the file that will contain a traceback
    "announce": {"resume_args": list, "global_batch_size": _MAYBE, "max_ranks": _MAYBE},
    "run_dir": {"path": str},  # a restart needs this folder
    "supports_stop": {},
    # `own_s` counts the seconds in which the thread that makes the steps ran or waited for a core, `cpu_s`
    # the CPU time of its process. It may have `shown`, new numbers of the training, by name. `counter` says
    # who counts the steps, see `mpiddp.runtime.job.progress`.
    "progress": {"step": int, "counter": int, "own_s": _NUMBER, "cpu_s": _NUMBER, "memory": int},
    "saving": {
        "active": bool
    },  # whether a save begins, or has ended. It may have the `path` of the file
    # The script has ended. The last file of torch.save or the like that it has written `age_s` ago, after this step, or
    # "", and the one that it was writing, or "".
    "wrote": {"path": str, "step": int, "age_s": _NUMBER, "torn": str},
    "saved": {"path": str},  # of a complete checkpoint
    "not_saved": {"save": str},  # a save has failed on this rank. All ranks call it by one name
    "stacks": {"text": str},
    # Calls of torch's collectives, by the rank's own clock: see `mpiddp.runtime.collectives`. It may have `peer`: the
    # `call`, the `rank`, `since_us` and the `stack` of a long wait in `recv` or `send`.
    "calls": {"now_us": int, "groups": list},
    # For each rank of its host with a GPU: the rank, and the fields CHANGING of `mpiddp.hosts.gpus`.
    "gpus": {"ranks": list},
    "stopped": {},
    "forming": {"active": bool},  # whether the script waits in torch's init_process_group
    "shadows": {
        "active": bool
    },  # whether the script repeats the collectives of others in torch's `join()`
    "terminal": {"echo": bool, "lines": bool},  # as rank 0's script has set its terminal
    # With `is_verdict`, `error` names the culprit, which may be another rank. With `follows`, it may follow
    # from the end of another rank. If a signal killed the rank,
    # `signal` is its number, and `passed` says whether the agent had received it. If the kernel has killed
    # processes for lack of memory, `oom_kills` counts them, and `memory_limit` is in bytes, or None.
    "failed": {"code": int, "error": str, "traceback": str, "is_verdict": bool},
    "function": {},  # asks for the function of `mpiddp.spawn`
    "answer": {"is_result": bool, "mac": str},  # with a pickle as the value
    "held": {"error": str},  # the script has ended; `error` is a fault of the host
    "exited": {},  # the script has ended with code 0, but without leaving the job
    "done": {},
}


def encode(kind: str, value: bytes = b"", seal: Seal | None = None, /, **facts: object) -> bytes:
    """The line of a message, with the next seal if there is one. `value` is JSON without line ends."""
    head = json.dumps({"type": kind, **facts}).encode()
    digits = seal.next(head, digest(value)) if seal else b""
    # Copy the value once: the result of a function of `mpiddp.spawn` may have gigabytes.
    return b"".join((digits, head, *((_TAB, value) if value else ()), _LINE_END))


class Forged(ValueError):
    """A line without the seal of the member."""


def decode(line: bytes, seal: Seal | None = None) -> tuple[dict[str, Any], bytes]:
    """The facts of a message with its type, and its value or b"". Raises ValueError or RecursionError.

    The line has to begin with this seal, if there is one.
    """
    head, _, value = line.partition(_TAB)
    if seal is not None:
        digits, head = head[:_SEAL], head[_SEAL:]
        if digits != seal.next(head, digest(value)):
            raise Forged
    if len(head) > LINE_LIMIT:
        raise ValueError("too long")
    text = head.decode()
    facts, end = _PARSER.raw_decode(text)  # json.loads takes twice as long: it guesses the encoding
    if end != len(text) or type(facts) is not dict or type(facts.get("type")) is not str:
        raise ValueError("not a message")
    return facts, value


def digest(value: bytes) -> bytes:
    """The digest of a value, which its seal covers, so that a value for many members is read once."""
    from _blake2 import blake2b

    return blake2b(value, digest_size=32).digest() if value else b""


class Seal:
    """The proofs of the lines in one direction of a connection: a MAC over a counter and the line.

    `key` is the member's. `challenges` are those of both ends, so that no line counts on another connection.
    """

    def __init__(self, key: str, challenges: str, direction: str) -> None:
        from _blake2 import blake2b

        self._hash = blake2b(
            f"{direction} {challenges}\n".encode(), key=key.encode(), digest_size=_SEAL // 2
        )
        self._count = 0

    def next(self, head: bytes, digest_of_value: bytes) -> bytes:
        """The seal of the next line."""
        self._count += 1
        state = self._hash.copy()
        state.update(b"%d %b\t%b" % (self._count, head, digest_of_value))
        return state.hexdigest().encode()


class Seals(NamedTuple):
    """The seals of the lines of a member and of the server."""

    of_member: Seal
    of_server: Seal


def seals(key: str, *challenges: str) -> Seals:
    """The seals of a connection, by the member's key and the challenges of the server and the member."""
    return Seals(*(Seal(key, " ".join(challenges), end) for end in ("member", "server")))


def introduce(
    connection: socket.socket, key: str, kind: str, rank: int, facts: Mapping[str, object]
) -> tuple[dict[str, Any], Seals]:
    """Answer the server's challenge by this message. Returns its answer, and the seals to come.

    Both sides prove that they have the member's key. Raises one of NO_MESSAGE if another program answers, or
    the server of another job, and OSError if the connection ends or does not answer within its timeout.
    """
    challenge = _next(connection)["challenge"]
    question = os.urandom(16).hex()
    proof = mac(key, f"member {challenge}")
    connection.sendall(encode(kind, b"", rank=rank, challenge=question, proof=proof, **facts))
    answer = _next(connection)
    # A second script of a rank gets "taken", without a proof.
    has_proof = answer.get("proof") == mac(key, f"server {question}")
    if answer["type"] != "taken" and not (answer["type"] == "received" and has_proof):
        raise ValueError("no proof")
    return answer, seals(key, challenge, question)


def _next(connection: socket.socket) -> dict[str, Any]:
    """Read the next message, and no byte more."""
    with connection.makefile("rb", buffering=0) as lines:
        line = lines.readline(UNPROVED_LINE_LIMIT)
    if not line.endswith(b"\n"):
        raise ConnectionResetError("the connection has ended")
    return decode(line[:-1])[0]


def member_key(key: str, role: str, rank: int) -> str:
    """The key of one member, derived from the job's key."""
    return mac(key, f"{role} {rank}")


def next_key(key: str) -> str:
    """The job's key for the next attempt of the same agents."""
    return mac(key, "the next attempt")


def mac(key: str, purpose: str, value: bytes = b"") -> str:
    """A MAC, which proves that a member of the job has made this value for this purpose."""
    from _blake2 import blake2b

    # A keyed BLAKE2 is a MAC. hashlib would load OpenSSL as well: 3.7 MB (CPython 3.10 to 3.14 on Linux) of a
    # launcher's 12 MB. test_still_needed.py checks this.
    digest = blake2b(f"{purpose}\n".encode(), key=key.encode(), digest_size=32)
    digest.update(value)
    return digest.hexdigest()


def listed(values: Mapping[int, bytes]) -> bytes:
    """The JSON of the values of all ranks. The most frequent value stands there once, the others by rank."""
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
    """The messages between the caller of `mpiddp.spawn` and its launcher, each with its value."""
    lines = Lines(1 << 62)  # without a limit, because the launcher belongs to the caller
    while chunk := connection.recv(1 << 20):
        for line in lines.split(chunk):
            yield decode(line)


def name_process(name: str) -> None:
    """Name this process, as ps and top show it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name, encoding="utf-8")


def state_folder() -> Path:
    """The folder for files that a later login finds. It is not absolute if there is no home folder."""
    folder = os.environ.get("XDG_STATE_HOME", "")
    parent = folder if folder.startswith("/") else os.path.expanduser("~/.local/state")  # noqa: PTH111
    return Path(parent, "mpiddp")


def viewed_folders() -> list[Path]:
    """The beginnings of the paths of the folders in which the launchers of this user listen for viewers.

    Machines may share the first folder, and containers a name, so it has the number of this machine's start.
    logind would remove XDG_RUNTIME_DIR at a user's last logout.
    """
    state, boot = state_folder(), Path("/proc/sys/kernel/random/boot_id")
    machine = f"{socket.gethostname()}-{boot.read_text('ascii')[:8]}"
    of_host = [state / machine / "job-"] if state.is_absolute() else []
    return [*of_host, Path(f"/tmp/mpiddp-job-{os.getuid()}-")]


def is_shown(selection: str, rank: int, stream: int) -> bool:
    """Whether the launcher shows this stream of a rank: by "default", "all", "none", or ranks, "0,5"."""
    if selection == DEFAULT_RANKS:
        return rank == 0 or stream == 2
    return selection == "all" or str(rank) in selection.split(",")


def is_valid(kind: str, facts: dict[str, Any]) -> bool:
    """Whether a message has its required fields, because a process of the job may have an error."""
    fields = MESSAGES.get(kind)
    return fields is not None and all(
        isinstance(facts.get(name, facts), types) for name, types in fields.items()
    )


def probe_interval_s(patience_s: float) -> int:
    """The seconds between two of the probes with which the kernel waits for so long, as far as it can."""
    return min(math.ceil(patience_s / _PROBES), _LONGEST_INTERVAL_S)


def notice_silence(
    connection: socket.socket, patience_s: float, *, is_read_slowly: bool = False
) -> None:
    """Make the kernel end the connection once the other host has been silent for this long.

    The kernel sends the probes, because a rank that imports torch, or computes, could send no heartbeat. Both
    ends of a Unix socket are on one host, so it gets none.

    is_read_slowly: the other end may read nothing for long, which TCP_USER_TIMEOUT would take for silence.
    """
    if connection.family == socket.AF_UNIX:
        return
    interval_s = probe_interval_s(patience_s)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, interval_s),
        (socket.TCP_KEEPINTVL, interval_s),
        (socket.TCP_KEEPCNT, _PROBES),
        (
            socket.TCP_USER_TIMEOUT,
            0 if is_read_slowly else min(round(patience_s * 1000), _LONGEST_MS),
        ),
        (socket.TCP_NODELAY, 1),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def silence_s(connection: socket.socket) -> float:
    """The seconds since anything came from the other host, such as an acknowledgement of its kernel."""
    if connection.family == socket.AF_UNIX:
        return 0.0
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO)
    *_, data_ms, acknowledgement_ms = memoryview(info).cast("I")
    return float(min(data_ms, acknowledgement_ms) / 1000)
