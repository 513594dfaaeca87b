"""This process in its job: what it is there, what it says to its launcher and its agent, and how it ends.

The agent of a script decides how the rank goes on (`mpiddp.runtime.rank_attempt`), and the script only tells it how
it ends. By hand the rank decides itself, and its parent sees its exit code.
"""

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
import time
from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from mpiddp.errors import FAILED, JobFailed, fault, print_error
from mpiddp.protocol.channel import CHUNK, SCRIPT, digest, encode
from mpiddp.protocol.variables import CHANNEL, CHANNEL_SECRET, ERROR_FILE, JOB, LOG_DIR, LOST_AFTER
from mpiddp.runtime.job.coordinator import GRACE_S, Coordinator
from mpiddp.runtime.job.ending import Ending, Refused, ending_of, record
from mpiddp.runtime.job.progress import Progress
from mpiddp.runtime.job.stopping import StopRequest
from mpiddp.world import World, is_joined

_HIGH = 4096  # the kernel's table of files grows with the highest number
_END_S = 2.0  # a thread that reads frames has this time to end
EXIT_UNKNOWN = SystemExit(FAILED)  # a script has exited, and only its parent knows the code
_OUR_FOLDER = str(Path(__file__).parents[1])  # the frames of its files lead to a script


class ProcessKind(Enum):
    """What a process is in its job. An agent has no session, and no kind."""

    SCRIPT = auto()  # the child of an agent, which sees how it ends
    FORK = auto()  # a fork of a script, which itself speaks for the rank
    WITHIN = auto()  # a rank's command or script has started it
    BY_HAND = auto()  # the rank itself: started by mpirun, srun, torchrun or a user


def _kind(forked: ProcessKind | None = None) -> ProcessKind:
    """The kind of this process, which may be `forked` from one of that kind. `main` of a script knows its own."""
    if not is_joined(os.environ):
        return ProcessKind.BY_HAND
    return (
        ProcessKind.FORK if forked in (ProcessKind.SCRIPT, ProcessKind.FORK) else ProcessKind.WITHIN
    )


class Session:
    """The state of one process. A process belongs to one job, so it has one session."""

    def __init__(self, kind: ProcessKind) -> None:
        self.kind = kind
        self.control: socket.socket | None = None  # a script's connection to its agent
        self.rank, self.is_shown = 0, False  # of a script; whether the launcher shows its stderr
        # It has host names once the ranks have joined. They join once: MPI cannot be initialized again.
        self.coordinator = Coordinator(World(0, 1, 0, 1))
        self.is_member = False  # this process has joined its job by itself, and leaves it by itself
        # The `mpiddp.runtime.rendezvous.store.StoreOfJob`, once a script with an agent has imported torch.
        self.store: Any = None
        # Is entered when the script starts MPI. Its body has the variables of this rank of its mpirun.
        self.starting_mpi: Callable[[], contextlib.AbstractContextManager[None]] = (
            contextlib.nullcontext
        )
        self.torch_store: object = None  # torch's store, if this process of rank 0 serves it
        self.error: BaseException | None = None  # has ended the script, or its process group
        self.progress = Progress(self.coordinator, self.tell_agent)
        self.stop = StopRequest(self.coordinator, self.progress, self.tell_agent)
        self._lock = threading.RLock()
        self._reads_frames = threading.Lock()  # a thread holds it while it reads frames

    def tell_agent(self, kind: str, **facts: object) -> None:
        if self.control is not None:
            with contextlib.suppress(OSError):  # the script has closed it
                # It begins a line, because a stack may have been cut before the end of one.
                self.control.sendall(b"\n" + encode(kind, b"", **facts))

    def _ask_agent(self, question: str, **facts: object) -> dict[str, Any]:
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
                os.kill(os.getpid(), number)
            case "stop" | "called":
                self.stop.is_requested = True
            case "stacks" | "calls" as kind:
                with contextlib.suppress(OSError):  # without a free file, an import fails, too
                    from mpiddp.runtime.collectives import calls, stacks

                    if (made := calls()) is not None:
                        self.coordinator.tell_launcher("calls", **made)
                    if kind == "stacks":
                        with self._reads_frames:
                            text = stacks()
                        self.coordinator.tell_launcher("stacks", text=text)

    def keep_output(self, folder: Path) -> None:
        """Let the agent write all output to files in `folder`, unless the user has named another one."""
        writes = self.kind is ProcessKind.SCRIPT and self.coordinator.has_launcher
        if writes and not os.environ.get(LOG_DIR):
            folder.mkdir(parents=True, exist_ok=True)  # the script gets the error, if there is one
            self.tell_agent("keep_output", folder=str(folder))

    def fails(self, error: BaseException | None) -> bool:
        """Whether a script that ends with this error has failed."""
        return ending_of(error, has_stopped=self.stop.has_stopped).is_failure

    def _leave(self, *, serves: bool) -> None:
        """Leave the job after a success, see `Coordinator.leave`. All ranks must call this."""
        if self.stop.has_stopped:
            self.progress.count_saves(0)
        # The first rank that exits with a code other than 0 ends the others, which may still save.
        self.coordinator.leave(waits=self.stop.has_stopped or serves)

    def fail(self, error: BaseException, *, is_printed: bool = False) -> bool:
        """Say why this script fails: record it for the agent, and print what only a rank can print.

        Errors of connections follow from that of the first rank to fail, and would hide it: they go to the
        rank's file alone. Ctrl-C interrupts all ranks, so rank 0 shows where, and the others have it in their
        files. So does a rank with the same error as the first, whose traceback the launcher shows. `is_printed`:
        Python has printed the error. Returns whether it is to be shown.
        """
        # A save in flight goes on after sys.exit(), because the agent ends the others. A claim ends it.
        is_first, is_same = (True, False) if isinstance(error, SystemExit) else self._claim(error)
        ending = ending_of(error)
        if ending.follows and is_first and not is_printed:
            # A rank that the kernel has killed claims no first failure.
            is_first = not self._ask_agent("lost_connection")
        if ending.error:  # both ways, because a full disk takes no file
            self.tell_agent("failed", ending=Ending(**ending.facts))
        if self.kind is not ProcessKind.BY_HAND:
            record(ending, os.environ.get(ERROR_FILE, ""))
        prints = ending.is_refusal or (ending.is_verdict and self.kind is ProcessKind.BY_HAND)
        if is_first and prints and not (is_printed or self.coordinator.has_launcher):
            print_error(ending.error)
        is_repeated = isinstance(error, KeyboardInterrupt) and self.rank > 0
        is_shown = not is_repeated and (is_first or not (ending.follows or is_same))
        if not (is_shown or is_printed):
            self.tell_agent("hidden", text=ending.facts["traceback"])
        return is_shown

    def _claim(self, error: BaseException) -> tuple[bool, bool]:
        """Whether this rank is the first to fail, and whether the first, another one, has the same error.

        Errors are the same if their classes, their texts and the lines that raised them are equal.
        """
        like = ""
        with contextlib.suppress(Exception):  # the __str__ of the error may fail
            # A Ctrl-C interrupts each rank elsewhere. A hook of the script's own, as of wandb, may do more than print.
            if self.is_shown and isinstance(error, Exception) and _hook() is sys.__excepthook__:
                like = digest(fault(error).encode(errors="replace")).hex()
        answer = {} if self.coordinator.connection else self._ask_agent("claim", like=like)
        is_first, first = answer.get("first") or self.coordinator.claim_first_failure(like)
        return is_first, not is_first and like != "" and like == first

    def end_script(self) -> int | str | None:
        """End a script as python does: leave, or show its error. Returns the argument of `sys.exit`."""
        error, is_shown = self.error, True
        with _handlers_wait() if error else contextlib.nullcontext():
            ending = ending_of(error, has_stopped=self.stop.has_stopped)
            if error and ending.is_failure:
                is_shown = self.fail(error)
        if error is None or not ending.is_failure:
            self.tell_agent("left")
            if not self.is_member:  # otherwise a handler of atexit leaves
                self._leave(serves=self.torch_store is not None)
        elif ending.traceback:  # otherwise a sentence says it all
            frames = script_frames(error.__traceback__)
            sys.last_type, sys.last_value, sys.last_traceback = type(error), error, frames
            if is_shown:
                _show(error.with_traceback(frames))
        if isinstance(error, SystemExit):
            # Python flushes the script's open files only if nothing but sys.last_value keeps its frames.
            error.__traceback__ = None
            return error.code
        return ending.code

    def tell_over_at_exit(self) -> None:
        """Tell the agent that all handlers of atexit have run. Python takes long to clear its modules."""
        # Python ends other threads where they are. The frames that they read keep the script's files open.
        self._reads_frames.acquire(timeout=_END_S)
        if self.error is not None and (ending := ending_of(self.error)).is_failure:
            _flush()
            self.tell_agent("over", code=ending.code)
        self.error = None  # its frames would keep the script's files open

    def end_command(self) -> None:
        """Record the error that has ended the script of a command, which Python has printed."""
        error = getattr(sys, "last_value", None)
        if error is not None and self is current():  # false in a forked child
            self.fail(error, is_printed=True)

    def begins_to_fail(self, error: BaseException) -> bool:
        """Whether this error, which leaves a process group, fails the rank. Then the agent learns it first.

        Once the group is destroyed, the other ranks fail as well.
        """
        fails = self is current() and self.fails(error) and not isinstance(error, Refused)
        if fails and self.kind is not ProcessKind.BY_HAND:
            self._claim(error)
        return fails

    def end_group(self, error: BaseException | None = None) -> None:
        """Leave after a success. Say why it is none, and raise SystemExit for a UserError or a JobFailed."""
        if self is not current():
            return
        ending = ending_of(error, has_stopped=self.stop.has_stopped)
        is_unknown, is_by_hand = error is EXIT_UNKNOWN, self.kind is ProcessKind.BY_HAND
        if is_unknown or not ending.is_failure:  # many scripts end with sys.exit(main())
            try:
                self.progress.finish()
                self._leave(serves=self.torch_store is not None and not is_unknown)
                return
            except (JobFailed, OSError) as failure:
                error = JobFailed(str(failure))
                ending = ending_of(error)
        if is_by_hand:
            self.error = error
        if error is None or ending.traceback:  # Python prints a traceback itself
            return
        is_exit = isinstance(error, SystemExit)
        if not (is_by_hand and is_exit):
            self.fail(error)
        if not is_exit:
            raise SystemExit(ending.code) from None

    def watch(self) -> None:
        """Agree on a stop, or end with the rank that has failed. By hand, the thread that receives calls this."""
        self.stop.agree()
        if self.coordinator.code_of_failure or self.coordinator.is_lost:
            time.sleep(GRACE_S)
            if self.is_member:
                exit_now(self.coordinator.code_of_end())

    def leave_at_exit(self) -> None:
        """Leave by hand, unless an error ends this process. The script has caught any other one."""
        fails = isinstance(self.error, SystemExit) or getattr(sys, "last_value", None)
        self.error = None  # its frames would keep the script's files open
        if self is current() and not fails:
            self.coordinator.send("leave")


_current = Session(_kind())


def current() -> Session:
    return _current


def script_session() -> Session:
    """The session of this process, connected to the server of its job. Raises JobFailed if that is silent.

    In a command of a rank (`mpiddp run -- COMMAND`), the first process that calls mpiddp is the script.
    """
    session, ranks = current(), current().coordinator
    with session._lock:  # the first calls may come from several threads at once
        speaks = session.kind in (ProcessKind.SCRIPT, ProcessKind.WITHIN) and CHANNEL in os.environ
        if ranks.connection or not speaks:
            return session
        from mpiddp.runtime.job.connection import AnotherScript, Server

        with contextlib.suppress(AnotherScript):
            key, lost_s = os.environ.get(CHANNEL_SECRET, ""), float(os.environ.get(LOST_AFTER, 0.0))
            server = Server(
                os.environ[CHANNEL], key, is_own=True, is_launcher=JOB in os.environ, lost_s=lost_s
            )
            ranks.connect(World.from_env(), server, SCRIPT)
            assert ranks.connection is not None
            # Not the number of `control`, which the script may have closed, so that it is free.
            ranks.connection = out_of_the_way(ranks.connection, below_limit=32)
            ranks.listen(session.obey, session.stop.agree)
            if session.kind is ProcessKind.WITHIN:
                atexit.register(session.end_command)
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
    before, _current = _current, Session(_kind(forked=_current.kind))
    before.control = None  # the script may hold the session
    before.coordinator.forget()


os.register_at_fork(after_in_child=_forget)


def exit_now(code: object) -> NoReturn:
    """End the process with this code, without the remaining handlers of atexit."""
    _flush()
    os._exit(code if isinstance(code, int) else 1)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the script may have closed or replaced it
            stream.flush()


def _hook() -> Any:
    """The hook that prints the error of the script, without torch's, which only adds the rank and calls it."""
    hook: Any = sys.excepthook
    while hook.__module__ == "torch.distributed.distributed_c10d":
        hook = dict(zip(hook.__code__.co_freevars, hook.__closure__, strict=True))[
            "old_hook"
        ].cell_contents
    return hook


def _show(error: BaseException) -> None:
    """Print the error that ends the script as python does, also if the script's own hook fails."""
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception as second:
        second.__traceback__ = script_frames(second.__traceback__)
        for title, shown in (
            ("Error in sys.excepthook", second),
            ("\nOriginal exception was", error),
        ):
            print(f"{title}:", file=sys.stderr)
            sys.__excepthook__(type(shown), shown, shown.__traceback__)


@contextlib.contextmanager
def _handlers_wait() -> Iterator[None]:
    """Let the script's handlers of signals wait for those of atexit, where their errors are no cause.

    That of DataLoader raises one when a worker ends, often just after the error that ends the script.
    """
    numbers = signal.valid_signals()
    handlers = {n: handler for n in numbers if callable(handler := signal.getsignal(n))}
    for number in handlers:
        signal.signal(number, lambda number, _: atexit.register(signal.raise_signal, number))
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def script_frames(traceback: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames that lead to the script."""
    while traceback and traceback.tb_frame.f_code.co_filename.startswith(("<frozen ", _OUR_FOLDER)):
        traceback = traceback.tb_next
    return traceback
