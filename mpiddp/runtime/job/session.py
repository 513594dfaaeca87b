"""The state of this process as a rank of its job, and what it tells its launcher and its agent."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mpiddp.errors import JobFailed, fault, print_error
from mpiddp.protocol.channel import CHUNK, SCRIPT, TEXT_LIMIT, digest, encode
from mpiddp.protocol.variables import CHANNEL, CHANNEL_SECRET, ERROR_FILE, JOB, LOG_DIR, LOST_AFTER
from mpiddp.runtime.job.coordinator import GRACE_S, Coordinator
from mpiddp.runtime.job.ending import Ending, ending_of, record
from mpiddp.runtime.job.progress import Progress
from mpiddp.runtime.job.stopping import StopRequest
from mpiddp.world import World, is_joined

_HIGH = 4096  # the kernel's table of files grows with the highest number
_END_S = 2.0  # a thread that reads frames has this time to end


class Session:
    """The state of one process. A process belongs to one job, so it has one session."""

    def __init__(self) -> None:
        # This process is the script of a rank, whose agent reports its end. By hand (mpirun, srun, torchrun)
        # it is the rank itself, and its parent sees how it ends.
        self.has_agent = is_joined(os.environ)
        self.control: socket.socket | None = None  # to the agent; None within a command
        self.is_shown = False  # the launcher shows the stderr of this process
        self.rank = 0  # of the script, as its agent has said
        self.is_fork = False  # a fork of a script, for which the script itself speaks
        # It has host names once the ranks have joined. They join once: MPI cannot be initialized again.
        self.coordinator = Coordinator(World(0, 1, 0, 1))
        self.is_member = False  # this process has joined its job by itself, and leaves it by itself
        self.runs: list[Any] = []  # the `mpiddp.checkpoints.records.RunRecords` of this process
        self.sinks: Any = None  # the `mpiddp.runtime.sinks` of this process, once it has logged
        # The `mpiddp.runtime.rendezvous.store.StoreOfJob`, once a script with an agent has imported torch.
        self.store: Any = None
        # Is entered when the script starts MPI. Its body has the variables of this rank of its mpirun.
        self.starting_mpi: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self.torch_store: object = None  # torch's store, if this process of rank 0 serves it
        self.error: BaseException | None = None  # has ended the script, or its process group
        self.progress = Progress(self.coordinator, self.tell_agent)
        self.stop = StopRequest(self.coordinator, self.progress, self.tell_agent)
        # They are called on every rank, the latest first, once its script has succeeded.
        self.before_leaving: list[Callable[[], None]] = []
        self.savers: list[Callable[[], None]] = []  # functions that wait for saves of this rank
        self._saves = 0
        self._lock = threading.RLock()
        self._reads_frames = threading.Lock()  # a thread holds it while it reads frames

    def tell_agent(self, kind: str, **facts: object) -> None:
        if self.control is not None:
            with contextlib.suppress(OSError):  # the script has closed it
                # It begins a line, because a stack may have been cut before the end of one.
                self.control.sendall(b"\n" + encode(kind, b"", **facts))

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
                os.kill(os.getpid(), number)
            case "stop" | "called":
                self.stop.is_requested = True
            case "stacks" | "calls" as kind:
                with contextlib.suppress(OSError):  # without a free file, an import fails, too
                    from mpiddp.runtime.collectives import calls

                    if (made := calls()) is not None:
                        self.coordinator.tell_launcher("calls", **made)
                    if kind == "stacks":
                        with self._reads_frames:
                            text = _stacks()
                        self.coordinator.tell_launcher("stacks", text=text)

    def log_to(self, folder: Path) -> None:
        """Let the agent write all output to files in `folder`, unless the user has named another one."""
        writes = self.control is not None and self.coordinator.has_launcher
        if writes and not os.environ.get(LOG_DIR):
            folder.mkdir(parents=True, exist_ok=True)  # the script gets the error, if there is one
            self.tell_agent("log_to", folder=str(folder))

    def count_saves(self, difference: int) -> None:
        """Count one more save, or one less. 0 says that this rank has saved, and waits for the others."""
        with self._lock:
            self._saves += difference
            if self._saves == max(0, difference):  # the first begins, or the last has ended
                self.coordinator.tell_launcher("saving", active=bool(self._saves))
                self.tell_agent("saving", active=bool(self._saves))

    def wait_for_saves(self) -> None:
        """Wait until this rank has no save in flight, whether the saves succeed or not. Not a collective."""
        for wait in self.savers:
            wait()

    def finish(self) -> None:
        """Make the calls before leaving. Raises JobFailed if the script has not succeeded after all."""
        while self.before_leaving:
            self.before_leaving.pop()()

    def leave(self, *, waits: bool | None = None) -> None:
        """Leave the job after a success, see `Coordinator.leave`. All ranks must call this."""
        if self.stop.has_stopped:
            self.count_saves(0)
        # The first rank that exits with a code other than 0 ends the others, which may still save.
        if waits is None:
            waits = self.torch_store is not None
        self.coordinator.leave(waits=self.stop.has_stopped or waits)

    def fail(self, error: BaseException, *, is_printed: bool = False) -> bool:
        """Say why this script fails: record it for the agent, and print what only a rank can print.

        Errors of connections follow from that of the first rank to fail, and would hide it: they go to the
        rank's file alone. Ctrl-C interrupts all ranks, so rank 0 shows where, and the others have it in their
        files. So does a rank with the same error as the first, whose traceback the launcher shows. `is_printed`:
        Python has printed the error. Returns whether it is to be shown.
        """
        # A save in flight goes on after sys.exit(), because the agent ends the others. A claim ends it.
        is_first, is_same = (True, False) if isinstance(error, SystemExit) else self.claim(error)
        ending = ending_of(error)
        if ending.follows and is_first and not is_printed:
            # A rank that the kernel has killed claims no first failure.
            is_first = not self._agent_answer("lost_connection")
        if ending.error:  # both ways, because a full disk takes no file
            self.tell_agent("failed", ending=Ending(**ending.facts))
        if self.has_agent:
            record(ending, os.environ.get(ERROR_FILE, ""))
        prints = ending.is_refusal or (ending.is_verdict and not self.has_agent)
        if is_first and prints and not (is_printed or self.coordinator.has_launcher):
            print_error(ending.error)
        is_repeated = isinstance(error, KeyboardInterrupt) and self.rank > 0
        is_shown = not is_repeated and (is_first or not (ending.follows or is_same))
        if not (is_shown or is_printed):
            self.tell_agent("hidden", text=ending.facts["traceback"])
        return is_shown

    def claim(self, error: BaseException) -> tuple[bool, bool]:
        """Whether this rank is the first to fail, and whether the first, another one, has the same error.

        Errors are the same if their classes, their texts and the lines that raised them are equal.
        """
        like = ""
        with contextlib.suppress(Exception):  # the __str__ of the error may fail
            # A Ctrl-C interrupts each rank elsewhere. A hook of the script's own, as of wandb, may do more than print.
            if self.is_shown and isinstance(error, Exception) and _hook() is sys.__excepthook__:
                like = digest(fault(error).encode(errors="replace")).hex()
        if self.coordinator.connection is None:
            answer = self._agent_answer("claim", like=like)
            is_first, first = answer["first"] if answer else (True, "")
        else:
            is_first, first = self.coordinator.claim_first_failure(like)
        return is_first, not is_first and like != "" and like == first

    def _agent_answer(self, question: str, **facts: object) -> dict[str, Any]:
        """The answer of the agent, {} if none comes within a second."""
        if self.control is None:
            return {}
        self.tell_agent(question, **facts)
        with contextlib.suppress(OSError, ValueError):  # the script has closed it
            try:
                self.control.settimeout(GRACE_S)
                answer: dict[str, Any] = json.loads(self.control.recv(CHUNK))
                return answer if answer["type"] == question else {}  # not that of an earlier question
            finally:
                self.control.settimeout(None)
        return {}

    def tell_over_at_exit(self) -> None:
        """Tell the agent that all handlers of atexit have run. Python takes long to clear its modules."""
        # Python ends other threads where they are. The frames that they read keep the script's files open.
        self._reads_frames.acquire(timeout=_END_S)
        if self.error is not None and (ending := ending_of(self.error)).is_failure:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):  # the script may have closed or replaced it
                    stream.flush()
            self.tell_agent("over", code=ending.code)
        self.error = None  # its frames would keep the script's files open

    def fail_at_exit(self) -> None:
        """Record the error that has ended the script of a command, which Python has printed."""
        error = getattr(sys, "last_value", None)
        if error is not None and self is current():  # false in a forked child
            self.fail(error, is_printed=True)


_current = Session()


def current() -> Session:
    return _current


def script_session() -> Session:
    """The session of this process, connected to the server of its job. Raises JobFailed if that is silent.

    In a command of a rank (`mpiddp run -- COMMAND`), the first process that calls a function of mpiddp is the
    rank's script.
    """
    session, ranks = current(), current().coordinator
    with session._lock:  # the first calls may come from several threads at once
        if ranks.connection or session.is_fork or not (CHANNEL in os.environ and session.has_agent):
            return session
        from mpiddp.runtime.job.connection import AnotherScript, Server

        with contextlib.suppress(AnotherScript):
            lost_s = float(os.environ.get(LOST_AFTER, 0.0))
            server = Server(os.environ[CHANNEL], os.environ.get(CHANNEL_SECRET, ""), is_own=True, lost_s=lost_s)
            ranks.connect(World.from_env(), server, SCRIPT)
            assert ranks.connection is not None
            # Not the number of `control`, which the script may have closed, so that it is free.
            ranks.connection = out_of_the_way(ranks.connection, below_limit=32)
            ranks.has_launcher = JOB in os.environ
            ranks.listen(session.obey, session.stop.agree)
            if session.control is None:
                atexit.register(session.fail_at_exit)
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
    before, _current = _current, Session()
    _current.is_fork = before.is_fork or before.control is not None
    before.control = None  # the script may hold the session
    before.coordinator.forget()


os.register_at_fork(after_in_child=_forget)


def _hook() -> Any:
    """The hook that prints the error of the script, without torch's, which only adds the rank and calls it."""
    hook: Any = sys.excepthook
    while hook.__module__ == "torch.distributed.distributed_c10d":
        hook = dict(zip(hook.__code__.co_freevars, hook.__closure__, strict=True))["old_hook"].cell_contents
    return hook


def _stacks() -> str:
    """The Python stacks of all threads of this process except this one, the main thread's first."""
    import traceback  # takes 5 ms

    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = {
        ident: f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    }
    # Of a long stack, the end is kept, which shows where the thread is.
    first = stacks.pop(threading.main_thread().ident or 0, "")[-TEXT_LIMIT:]
    return "\n".join([first, *stacks.values()])[:TEXT_LIMIT]
