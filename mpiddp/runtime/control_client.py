"""What a rank tells its launcher and hears from it: JSON lines over one small TCP connection.

Not stdout, which is the script's own, and not mpirun's exit code, which lies. MPIDDP_CONTROL says
where the launcher listens, MPIDDP_CONTROL_SECRET proves that both belong to one job; the secret
itself never crosses the wire. Without these two there is no channel, and no difference.

    launcher -> rank   challenge, stop, stacks, end; one urgent byte, see `_answer_from_native_code`
    rank -> launcher   hello, started, joining, log, announce, supports_stop, progress, stacks, stopped,
                        failed, done
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from mpiddp.errors import BAD_INPUT, UserError
from mpiddp.protocol import ADDRESS, SECRET, TEXT_LIMIT, URGENT, dumps, notice_silence, proof
from mpiddp.world import World

CONNECT_TIMEOUT_S = 10.0
PROGRESS_EVERY_S = 0.5
ORPHANED = 1  # the exit code of a rank whose launcher is gone

_PR_SET_PDEATHSIG = 1
_F_SETOWN_EX, _F_OWNER_TID = 15, 0  # linux/fcntl.h


class ControlClient:
    """This rank's connection. `on` maps a message of the launcher's to what is done about it."""

    def __init__(self, connection: socket.socket, incoming: Iterator[bytes], world: World) -> None:
        self.on: dict[str, Callable[[dict[str, Any]], None]] = {
            "end": lambda message: os._exit(int(message["code"])),
            "stop": lambda message: _request_stop(),
            "stacks": lambda message: self.send(
                "stacks", text=stacks()[-TEXT_LIMIT:], step=self.step
            ),
        }
        self.world = world
        self.step = 0  # how far this rank is
        self.is_first: bool | None = None  # to fail, as far as the coordinator's store knows
        self._said_progress_at = 0.0
        self._connection = connection
        self._incoming = incoming
        self._lock = threading.Lock()
        self._is_over = False
        # A child that holds the connection would hide this rank's death.
        os.register_at_fork(after_in_child=self._connection.close)
        _answer_from_native_code(connection)
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, kind: str, **facts: object) -> None:
        # Where nobody listens any more, the listening thread has noticed it as well.
        with self._lock, contextlib.suppress(OSError):
            self._connection.sendall(dumps(kind, **facts))

    def progress(self, step: int) -> None:
        """Costs nothing in most steps: it is sent twice a second at most."""
        self.step = step
        now = time.monotonic()
        if now - self._said_progress_at >= PROGRESS_EVERY_S:
            self._said_progress_at = now
            self.send("progress", step=step)

    def failed(self, code: int, error: str, trace: str = "") -> None:
        self._is_over = True
        self.send(
            "failed",
            code=code,
            error=error[:TEXT_LIMIT],  # its beginning is what counts
            traceback=trace[-TEXT_LIMIT:],
            first=self.is_first,
        )

    def done(self) -> None:
        self._is_over = True
        self.send("done")

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            for line in self._incoming:
                message = json.loads(line)
                if act := self.on.get(message["type"]):
                    act(message)
        if not self._is_over:
            world = self.world
            sentence = f"rank {world.rank} on {world.hostname}: the launcher is gone, so am I.\n"
            with contextlib.suppress(OSError):
                os.write(2, sentence.encode())
            os._exit(ORPHANED)


def _answer_from_native_code(connection: socket.socket) -> None:
    """Let the kernel turn an urgent byte into SIGURG, and that write the main thread's Python stack.

    No Python code runs for that, so it works where native code keeps the interpreter's lock as well.
    Hence the signal goes to the main thread, to write its own stack alone: another thread's may change
    while it is read, which is a segmentation fault where a rank was but slow to answer.
    """
    owner = struct.pack("ii", _F_OWNER_TID, threading.main_thread().native_id)
    fcntl.fcntl(connection, _F_SETOWN_EX, owner)
    faulthandler.register(signal.SIGURG, file=connection.fileno(), all_threads=False)


# This process's own, if its launcher gave it one. A child that was forked has none.
channel: ControlClient | None = None


def send(kind: str, **facts: object) -> None:
    """Tell the launcher, if there is one."""
    if channel is not None:
        channel.send(kind, **facts)


def _request_stop() -> None:
    from mpiddp.runtime.stop_request import ask

    ask()


def _forget() -> None:
    global channel
    channel = None


def _die_with_daemon() -> None:
    """With its MPI's daemon gone, nobody would end this rank."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@contextlib.contextmanager
def reporting(world: World) -> Iterator[None]:
    """The launcher, if there is one, hears of this rank's start and of its end, whatever that is.

    With or without one, a crash shows its stacks, and a rank ends with the daemon that started it.

    Raises:
        UserError: there is a launcher, but it cannot be reached.
    """
    global channel
    faulthandler.enable(2)  # a crash in native code shows on stderr where Python was
    if world.launcher.speaks_mpi or world.launcher.name == "slurm":
        _die_with_daemon()
    # Not for processes that the script starts: they are no ranks.
    address, secret = os.environ.pop(ADDRESS, ""), os.environ.pop(SECRET, "")
    if not address or not secret:
        yield
        return
    channel = _connect(address, secret, world)
    os.register_at_fork(after_in_child=_forget)
    versions = {package: _version(package) for package in ("torch", "mpi4py")}
    channel.send(
        "started",
        host=world.hostname,
        pid=os.getpid(),
        versions={"python": sys.version.split()[0], **versions},
    )
    try:
        yield
    except BaseException as error:
        if channel is not None:  # a child that was forked is no rank
            _report(channel, error)
        raise
    if channel is not None:
        channel.done()


def _report(channel: ControlClient, error: BaseException) -> None:
    """What ended this rank."""
    if isinstance(error, SystemExit):
        if error.code and not _stopped(error):
            code = error.code if isinstance(error.code, int) else 1
            channel.failed(code, "" if isinstance(error.code, int) else str(error.code))
        else:
            channel.done()
    elif isinstance(error, UserError):
        channel.failed(BAD_INPUT, str(error))
    else:
        import traceback

        channel.failed(1, describe(error), traceback.format_exc())


def _stopped(end: SystemExit) -> bool:
    """Whether this is the end that somebody asked for."""
    from mpiddp.runtime.stop_request import is_requested_end

    return is_requested_end(end.code)


def describe(error: BaseException) -> str:
    """ "RuntimeError: a bug", or "KeyError" for an error without a text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def stacks() -> str:
    """The Python stacks of all threads of this process but the one that asks."""
    import traceback  # 5 ms that the launcher, which reads this file too, has no use for

    names = {thread.ident: thread.name for thread in threading.enumerate()}
    texts = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            lines = "".join(traceback.format_stack(frame))
            texts.append(f"thread {names.get(ident, ident)}:\n{lines}")
    return "\n".join(texts)


def _connect(address: str, secret: str, world: World) -> ControlClient:
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S)
        notice_silence(connection)
        incoming = _lines(connection)
        challenge = json.loads(next(incoming, b""))["challenge"]
        answer = proof(secret, challenge, world.rank)
        connection.sendall(dumps("hello", rank=world.rank, proof=answer))
    except (OSError, ValueError, LookupError) as error:
        raise UserError(
            f"rank {world.rank} on {world.hostname} cannot reach its launcher at {host} port {port} "
            f"({error or 'no answer'}). Is it running, and is no firewall between?"
        ) from None
    connection.settimeout(None)
    return ControlClient(connection, incoming, world)


def _lines(connection: socket.socket) -> Iterator[bytes]:
    """Not a file object: its buffer and its lock would keep a forked child from closing the socket."""
    buffer = b""
    while chunk := connection.recv(4096):
        # The kernel takes an urgent byte out of the stream only if it is read before the next one.
        *whole, buffer = (buffer + chunk.replace(URGENT, b"")).split(b"\n")
        yield from whole


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None
