"""This process in its job: what it is there, and what it says to its launcher and its agent.

`mpiddp.runtime.job.leaving` has how it ends.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpiddp.errors import JobFailed
from mpiddp.protocol.channel import CHUNK, SCRIPT, encode
from mpiddp.protocol.variables import CHANNEL, CHANNEL_SECRET, COMMAND, JOB, LOG_DIR, LOST_AFTER
from mpiddp.runtime.job.coordinator import GRACE_S, Coordinator
from mpiddp.runtime.job.leaving import End
from mpiddp.runtime.job.progress import Progress
from mpiddp.runtime.job.stopping import StopRequest
from mpiddp.world import World, is_joined

if TYPE_CHECKING:
    from mpiddp.runtime.job.writes import Writes

_HIGH = 4096  # the kernel's table of files grows with the highest number
_END_S = 2.0  # a thread that reads frames has this time to end


class ProcessKind(Enum):
    """What a process is in its job. An agent has no session, and no kind."""

    SCRIPT = auto()  # the child of an agent, which sees how it ends
    WITHIN = auto()  # a rank's command or script has started it, or has forked it
    BY_HAND = auto()  # the rank itself: started by mpirun, srun, torchrun or a user


def _kind(env: Mapping[str, str]) -> ProcessKind:
    """The kind of this process. `main` of a script knows its own."""
    return ProcessKind.WITHIN if is_joined(env) else ProcessKind.BY_HAND


class Session:
    """The state of one process. A process belongs to one job, so it has one session."""

    def __init__(self, kind: ProcessKind) -> None:
        self.kind = kind
        self.control: socket.socket | None = None  # a script's connection to its agent
        self.rank, self.is_shown = 0, False  # of a script; whether the launcher shows its stderr
        # The variables by which this process finds its job: of a script those of its agent, whatever it sets later.
        self.env: Mapping[str, str] = os.environ
        # It has host names once the ranks have joined. They join once: MPI cannot be initialized again.
        self.coordinator = Coordinator(World(0, 1, 0, 1))
        self.is_member = False  # this process has joined its job by itself, and leaves it by itself
        # The `mpiddp.runtime.rendezvous.store.StoreOfJob`, once a script with an agent has imported torch.
        self.store: Any = None
        # Is entered when the script starts MPI. Its body has the variables of this rank of its mpirun.
        self.starting_mpi: Callable[[], contextlib.AbstractContextManager[None]] = (
            contextlib.nullcontext
        )
        # The threads that wait in torch's `recv` or `send`: the call, the other rank, and since when (microseconds).
        self.peers: dict[int, tuple[str, object, int]] = {}
        self.torch_store: object = None  # torch's store, if this process of rank 0 serves it
        self.progress = Progress(self.coordinator, self.tell_agent)
        self.stop = StopRequest(self.coordinator, self.progress, self.tell_agent)
        self.writes: Writes | None = None  # of a script that has imported torch
        self.end = End(self)
        self._lock = threading.RLock()
        self._reads_frames = threading.Lock()  # a thread holds it while it reads frames

    @property
    def is_current(self) -> bool:
        """Whether this is the session of this process, and not of the one that it was forked from."""
        return self is _current

    @property
    def is_by_hand(self) -> bool:
        return self.kind is ProcessKind.BY_HAND

    def tell_agent(self, kind: str, **facts: object) -> bool:
        """Send the agent a message. Returns whether it gets it."""
        if self.control is not None:
            with contextlib.suppress(OSError):  # the script has closed it
                # It begins a line, because a stack may have been cut before the end of one.
                self.control.sendall(b"\n" + encode(kind, b"", **facts))
                return True
        return False

    def ask_agent(self, question: str, **facts: object) -> dict[str, Any]:
        """The answer of the agent, {} if none comes within a second."""
        if self.control is None:
            return {}
        self.tell_agent(question, **facts)
        with contextlib.suppress(OSError, ValueError):  # the script has closed it
            try:
                self.control.settimeout(GRACE_S)
                answer: dict[str, Any] = json.loads(self.control.recv(CHUNK))
                return (
                    answer if answer["type"] == question else {}
                )  # not that of an earlier question
            finally:
                self.control.settimeout(None)
        return {}

    def obey(self, facts: Mapping[str, Any]) -> None:
        """Act on a message of the launcher, or on the call of another rank. "end" is the agent's business."""
        number = facts.get("signal", signal.SIGTERM)
        if facts["type"] == "stop":  # first, because the signal may end this process
            self.tell_agent("stopping", signal=number)
        match facts["type"]:
            case "stop" if not self.stop.supports_stop:
                # A script without should_stop() would not react to the handler of a request.
                if signal.getsignal(number) in self.stop.handlers:
                    number = signal.SIGTERM
                # The agent waits for the end of a write. This thread may not: Python runs it too rarely.
                if self.writes is None or not self.tell_agent("interrupt", signal=number):
                    os.kill(os.getpid(), number)
            case "stop" | "called":
                self.stop.is_requested = True
            case "stacks" | "calls" as kind:
                with contextlib.suppress(OSError):  # without a free file, an import fails, too
                    from mpiddp.runtime.collectives import calls, stacks

                    if (made := calls(self.peers)) is not None:
                        self.coordinator.tell_launcher("calls", **made)
                    if kind == "stacks":
                        with self._reads_frames:
                            text = stacks()
                        self.coordinator.tell_launcher("stacks", text=text)

    def keep_output(self, folder: Path) -> None:
        """Let the agent write all output to files in `folder`, unless the user has named another one."""
        writes = self.kind is ProcessKind.SCRIPT and self.coordinator.has_launcher
        if writes and not self.env.get(LOG_DIR):
            folder.mkdir(parents=True, exist_ok=True)  # the script gets the error, if there is one
            self.tell_agent("keep_output", folder=str(folder))

    def tell_over_at_exit(self) -> None:
        # Python ends other threads where they are. The frames that they read keep the script's files open.
        self._reads_frames.acquire(timeout=_END_S)
        self.end.tell_over()


_current = Session(_kind(os.environ))


def current() -> Session:
    return _current


def script_session(*, joins: bool = False) -> Session:
    """The session of this process, connected to the server of its job. Raises JobFailed if that is silent.

    For a rank speaks the process that its agent has started. In its place, one that it has started itself, as with
    multiprocessing, may join the others, but not only report. In a command of a rank (`mpiddp run -- COMMAND`),
    the first process that calls mpiddp is the script.
    """
    session, ranks = current(), current().coordinator
    with session._lock:  # the first calls may come from several threads at once
        env = session.env
        is_within = session.kind is ProcessKind.WITHIN and (joins or COMMAND in env)
        speaks = session.kind is ProcessKind.SCRIPT or is_within
        if ranks.connection or not (speaks and CHANNEL in env):
            return session
        from mpiddp.runtime.job.connection import AnotherScript, Server

        with contextlib.suppress(AnotherScript):
            key, lost_s = env.get(CHANNEL_SECRET, ""), float(env.get(LOST_AFTER, 0.0))
            server = Server(env[CHANNEL], key, is_own=True, is_launcher=JOB in env, lost_s=lost_s)
            ranks.connect(World.from_env(env), server, SCRIPT)
            assert ranks.connection is not None
            # Not the number of `control`, which the script may have closed, so that it is free.
            ranks.connection = out_of_the_way(ranks.connection, below_limit=32)
            ranks.listen(session.obey, session.stop.agree)
            if session.kind is ProcessKind.WITHIN:
                atexit.register(session.end.of_command)
    return session


def out_of_the_way(connection: socket.socket, below_limit: int = 64) -> socket.socket:
    """The same socket with a high number, which no file gets that a script opens after it has closed all."""
    limit = min(os.sysconf("SC_OPEN_MAX"), _HIGH)
    with connection, contextlib.suppress(OSError):  # no file is left
        number = fcntl.fcntl(connection, fcntl.F_DUPFD_CLOEXEC, max(3, limit - below_limit))
        return socket.socket(fileno=number)
    raise JobFailed(f"{limit} open files are too few (ulimit -n).")


def _forget() -> None:
    global _current
    before, _current = _current, Session(_kind(_current.env))
    _current.env, _current.store = before.env, before.store
    before.control = None  # the script may hold the session
    before.coordinator.forget()


os.register_at_fork(after_in_child=_forget)
