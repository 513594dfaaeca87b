"""The state of this process as a rank of its job, and what it tells its launcher and its agent.

It is one object, which is passed to the code that needs it. Public functions that take no argument, such as
should_stop() and init(), use `script_session()`. Under `mpiddp launch` and `mpiddp run` the script's process
is the child of the rank's agent, and has a channel of its own to the server of the job. By hand (mpirun,
srun, torchrun) the process is the rank itself.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import numbers
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mpiddp.protocol.channel import SCRIPT
from mpiddp.protocol.messages import MOST_SHOWN, SHOWN_BYTES, TEXT_LIMIT, is_short
from mpiddp.protocol.variables import CHANNEL, CHANNEL_SECRET, JOB, LOG_DIR
from mpiddp.runtime.job.connection import AnotherScript, Server
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.job.ending import Ending, ending_of
from mpiddp.runtime.job.stop import BY_OPTIMIZER, StopRequest
from mpiddp.world import World, is_joined

PROGRESS_EVERY_S = 0.5


class Session:
    """The state of one process. A process belongs to one job, so it has one session.

    Attributes:
        channel: connected to the server of the job; None until it is.
        control: the connection to the agent that has started this script; None for any other process.
        has_launcher: whether `mpiddp launch` listens.
        coordinator: None until the ranks have joined. They join once: MPI cannot be initialized again.
        watch: set while this process is in the process group of its job.
        run: the `mpiddp.checkpoints.records.RunRecords` of this process's run.
        torch_store: the store that rank 0 serves as long as its process lives.
        error: what has ended the script, once its agent's program knows it.
        has_printed: the sentence of that error.
        before_leaving: calls on every rank, the latest first, once its script has succeeded.
        savers: each waits until this rank has no save of one kind in flight.
    """

    def __init__(self) -> None:
        self.channel: Coordinator | None = None
        self.control: socket.socket | None = None
        self.has_launcher = self.has_printed = False
        self.coordinator: Coordinator | None = None
        self.watch: object = None
        self.run: Any = None
        self.torch_store: object = None
        self.error: BaseException | None = None
        self.has_said_why = False  # to whoever reports this end
        self.stop = StopRequest(self)
        self.before_leaving: list[Callable[[], None]] = []
        self.savers: list[Callable[[], None]] = []
        self._pid = os.getpid()
        self._saves = 0
        self._lock = threading.RLock()
        self._step = 0  # the latest step of this rank
        self._counter = BY_OPTIMIZER
        self._sent_at = 0.0
        self._shown: dict[str, Any] = {}  # that has not been sent
        self._phases: dict[str, Any] = {}  # the same

    def connect(self) -> None:
        """Connect this script to the server of its job, which its rank's variables name.

        Raises AnotherScript if this rank has a script already, JobFailed if the server cannot be reached.
        """
        server = Server(os.environ[CHANNEL], os.environ.get(CHANNEL_SECRET, ""))
        self.channel = channel = Coordinator(World.from_env(), server, SCRIPT)
        self.has_launcher = JOB in os.environ
        channel.listen(self._obey, partial(self.stop.agree, channel))

    def _obey(self, facts: Mapping[str, Any]) -> None:
        """Act on a message of the launcher. The agent ends this process, so "end" is none of its."""
        match facts["type"]:
            case "stop":
                self.stop.request()
            case "stacks":
                with contextlib.suppress(OSError):  # no file is left, not even to import
                    self.send("stacks", step=self._step, text=_stacks(), **usage_of(os.getpid()))

    def send(self, kind: str, **facts: object) -> None:
        """Send the launcher a message, if there is a launcher."""
        if self.has_launcher and self.channel is not None:
            self.channel.send(kind, b"", **facts)

    def tell_agent(self, kind: str, **facts: object) -> None:
        """Tell the agent that has started this script, if one has."""
        if self.control is not None:
            with contextlib.suppress(OSError):  # the script has closed it
                self.control.sendall(json.dumps({"type": kind, **facts}).encode() + b"\n")

    @property
    def is_of_this_process(self) -> bool:
        """False in a forked child, which is not a rank."""
        return os.getpid() == self._pid

    # --- progress ---

    def count(self, step: int, counter: int) -> None:
        """Report this step by one who counts, at most twice a second. Most calls send nothing.

        Several optimizers may count one step. A launcher that is stopped (Ctrl-Z) reads nothing, and the
        script goes on: while the connection has no room, no step is reported.
        """
        if counter < self._counter or (counter == BY_OPTIMIZER and step <= self._step):
            return
        self._counter, self._step = counter, step
        now = time.monotonic()
        is_due = now - self._sent_at >= PROGRESS_EVERY_S
        if is_due and self.channel is not None and self.channel.has_room:
            self._sent_at = now
            shown, self._shown = self._shown, {}
            while len(json.dumps(shown)) > SHOWN_BYTES:
                shown.popitem()
            news = {**self._phases, **({"shown": shown} if shown else {})}
            self.send("progress", step=step, **_usage(), **news)
            self._phases = {}

    def show(self, values: Mapping[str, Any]) -> None:
        """Send these values of the training with the next progress, but those that cannot be shown."""
        for name, value in values.items():
            if type(value) not in (bool, int, float) and isinstance(value, numbers.Real):  # numpy's
                value = int(value) if isinstance(value, numbers.Integral) else float(value)
            has_room = name in self._shown or len(self._shown) < MOST_SHOWN
            if has_room and is_short(name, value):
                self._shown[name] = value

    def tell_phases(self, phases: Mapping[str, float]) -> None:
        """Send with the next progress what all "steps" so far have spent in each of their phases."""
        self._phases = {"phases": {**phases, "steps": int(phases["steps"])}}

    # --- saves, and the end ---

    def log_to(self, folder: Path) -> None:
        """Write this rank's output, from its first line on, to files in `folder`, if its agent copies it.

        Not if the user has named another folder.
        """
        if self.control is not None and self.has_launcher and not os.environ.get(LOG_DIR):
            folder.mkdir(parents=True, exist_ok=True)  # here, where an error is the script's own
            self.tell_agent("log_to", folder=str(folder))

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """See `mpiddp.saving`."""
        self.count_saves(1)
        try:
            yield
        finally:
            self.count_saves(-1)

    def count_saves(self, difference: int) -> None:
        """One more save, or one less. With 0, this rank has saved what a stop requires, and only waits."""
        with self._lock:
            self._saves += difference
            if self._saves == max(0, difference):  # the first begins, or the last has ended
                self.send("saving", active=bool(self._saves))

    def wait_for_saves(self) -> None:
        """Wait until this rank has no save in flight, whether the saves succeed or not. Not a collective."""
        for wait in self.savers:
            wait()

    def finish(self) -> None:
        """Make the calls before leaving. Raises JobFailed if the script has not succeeded after all."""
        while self.before_leaving:
            self.before_leaving.pop()()

    def report(self, ending: Ending) -> None:
        """Say why this script has failed, to whoever reports its end.

        A later exit code without a sentence follows from an error that was reported.
        """
        if self.has_said_why and not ending.sentence:
            return
        self.has_said_why = bool(ending.sentence)
        if self.control is not None:
            self.tell_agent("error", **ending.facts)
        else:
            self.send("failed", **ending.facts)


_current = Session()


def current() -> Session:
    """The session of this process."""
    return _current


def script_session() -> Session:
    """The session of this process, which is connected first if it is the script of a rank's command.

    In a command of a rank (`mpiddp run -- COMMAND`), the first process that calls a function of mpiddp is the
    rank's script. The agent reports its start and its end; the script reports the rest, and its error. Raises
    JobFailed if the server of the job cannot be reached.
    """
    session = current()
    if session.channel is None and CHANNEL in os.environ and is_joined(os.environ):
        with contextlib.suppress(AnotherScript):
            session.connect()
            atexit.register(_report_end, session)
    return session


def _report_end(session: Session) -> None:
    """Tell the launcher why this script of a command ends. Python keeps only an error that it prints."""
    error = getattr(sys, "last_value", None)
    if session.channel is not None and not session.has_said_why:  # None in a forked child
        if error is None:
            session.send("done")
        else:
            session.channel.claim_first_failure()
            session.report(ending_of(error, has_stopped=session.stop.has_stopped))


def _forget() -> None:
    global _current
    _current.channel = _current.control = None  # for code that holds the session
    _current.has_launcher = False
    _current = Session()


os.register_at_fork(after_in_child=_forget)


def _usage() -> dict[str, float]:
    """What this thread, which makes the steps, and this process have used so far: seconds, and bytes."""
    queued_ns = pages = 0
    # A kernel without them, or no file is left.
    with contextlib.suppress(OSError, ValueError, IndexError):
        queued_ns = int(Path("/proc/thread-self/schedstat").read_bytes().split()[1])
        pages = int(Path("/proc/self/statm").read_bytes().split()[1])
    return {
        "own_s": round((time.thread_time_ns() + queued_ns) / 1e9, 3),
        "cpu_s": round(time.process_time(), 3),
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
    }


def usage_of(pid: int) -> dict[str, Any]:
    """The processor time of a process with its descendants, and the state of its main thread.

    "D" while it waits for a disk; "" if the kernel does not tell.
    """
    from mpiddp.hosts.processes import processor_time

    facts = {"cpu_s": 0.0, "state": ""}
    with contextlib.suppress(OSError, IndexError):  # it has ended, or this process has no file left
        facts["cpu_s"] = processor_time(pid)
        stat = Path(f"/proc/{pid}/task/{pid}/stat").read_bytes()
        facts["state"] = stat.rpartition(b")")[2].split()[0].decode()
    return facts


def _stacks() -> str:
    """The Python stacks of all threads of this process except this one, the main thread's first."""
    import traceback  # takes 5 ms

    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = {
        ident: f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    }
    # The end of a long stack is where the thread is.
    first = stacks.pop(main or 0, "")[-TEXT_LIMIT:]
    return "\n".join([first, *stacks.values()])[:TEXT_LIMIT]
