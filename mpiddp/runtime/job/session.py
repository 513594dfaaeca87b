"""The state of this process as a rank of its job, and what it tells its launcher and its agent.

It is one object, which is passed to the code that needs it. Public functions that take no argument, such as
should_stop() and init(), use `script_session()`. Under `mpiddp launch` and `mpiddp run` the script's process
is the child of the rank's agent, and has a channel of its own to the server of the job. By hand (mpirun,
srun, torchrun) the process is the rank itself.

All ranks stop after the same step, and exchange messages only after a request to stop. Then the thread of
each rank's channel proposes a step slightly ahead, in a gather to which the first calls the others. The rank
does not pass that step before the decision. All ranks stop at the highest proposed step, which no rank has
passed.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import numbers
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mpiddp.protocol.channel import MOST_SHOWN, SCRIPT, SHOWN_BYTES, TEXT_LIMIT, is_short
from mpiddp.protocol.variables import CHANNEL, CHANNEL_SECRET, JOB, LOG_DIR
from mpiddp.runtime.job.connection import AnotherScript, Server
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.job.ending import Ending, ending_of
from mpiddp.world import World, is_joined

BY_OPTIMIZER, BY_CALLS, BY_SCRIPT = range(3)  # who counts the steps; the last one is right
PROGRESS_EVERY_S = 0.5
_AHEAD = 2  # steps; no rank waits if they take longer than the agreement


class Session:
    """The state of one process. A process belongs to one job, so it has one session."""

    def __init__(self) -> None:
        self.channel: Coordinator | None = None  # connected to the server of the job
        self.control: socket.socket | None = None  # to the agent that has started this script
        self.has_launcher = False  # `mpiddp launch` listens
        # None until the ranks have joined. They join once: MPI cannot be initialized again.
        self.coordinator: Coordinator | None = None
        self.watch: object = None  # set while this process is in the process group of its job
        self.run: Any = None  # the `mpiddp.checkpoints.records.RunRecords` of this process's run
        self.torch_store: object = None  # rank 0 serves it as long as its process lives
        self.error: BaseException | None = None  # that has ended the script, under an agent
        self.has_said_why = False  # to whoever reports this end
        self.stop = StopRequest(self)
        # Calls on every rank, the latest first, once its script has succeeded.
        self.before_leaving: list[Callable[[], None]] = []
        self.savers: list[Callable[[], None]] = []  # each waits for this rank's saves of one kind
        self.phases: Mapping[str, float] = {}  # what all "steps" have spent in each, to be sent
        self._saves = 0
        self._lock = threading.RLock()
        self._step = 0  # the latest step of this rank
        self._counter = BY_OPTIMIZER
        self._sent_at = 0.0
        self._shown: dict[str, Any] = {}  # that has not been sent

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
            case "stop" if self.stop.supports_stop:
                self.stop.note_request()
            case "stop":
                os.kill(os.getpid(), signal.SIGTERM)
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
            phases, self.phases = self.phases, {}
            news = {"shown": shown, "phases": phases}
            self.send("progress", step=step, **_usage(), **{k: v for k, v in news.items() if v})

    def show(self, values: Mapping[str, Any]) -> None:
        """Send these values of the training with the next progress, but those that cannot be shown."""
        for name, value in values.items():
            if type(value) not in (bool, int, float) and isinstance(value, numbers.Real):  # numpy's
                value = int(value) if isinstance(value, numbers.Integral) else float(value)
            has_room = name in self._shown or len(self._shown) < MOST_SHOWN
            if has_room and is_short(name, value):
                self._shown[name] = value

    def log_to(self, folder: Path) -> None:
        """Write this rank's output, from its first line on, to files in `folder`, if its agent copies it.

        Not if the user has named another folder.
        """
        if self.control is not None and self.has_launcher and not os.environ.get(LOG_DIR):
            folder.mkdir(parents=True, exist_ok=True)  # here, where an error is the script's own
            self.tell_agent("log_to", folder=str(folder))

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


class StopRequest:
    """The state of a requested stop in this process. Its steps are the calls of `should_stop`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = threading.RLock()  # a handler of a signal may call os._exit
        self._calls = 0
        self._denied = 0  # the latest call at which the ranks do not stop
        self.steps_before = 0  # of the run, which another process has made
        self._key = "stop"  # of the gather of the proposals
        self._proposed: int | None = None
        self._step: int | None = None
        self._decided = threading.Event()
        self.has_stopped = False  # this script ends early, as requested
        # A plain flag: a signal handler that waits for a lock could wait for its own thread.
        self.is_requested = False
        self.supports_stop = False  # whether the script calls `should_stop`

    def enter_group(self) -> None:
        """The ranks meet again. What they proposed when they left the last group counts no longer."""
        with self._lock:
            if self._proposed is not None and self._step is None:
                self._key, self._proposed = f"{self._key}+", None

    def declare_support(self) -> None:
        """Declare that this script calls `should_stop`, so that an earlier request waits for the call."""
        if not self.supports_stop:
            self.supports_stop = True
            self._session.send("supports_stop")
            if self._session.has_launcher:
                stop_on(self, signal.SIGTERM)

    def note_request(self) -> None:
        """Stop this script at its next agreed step. A signal handler may call this."""
        self.is_requested = True
        if self._session.channel is not None:
            self._session.channel.wake()

    def should_stop(self) -> bool:
        """See `mpiddp.should_stop`."""
        self.declare_support()
        with self._lock:
            self._calls += 1
        self._session.count(self.steps_before + self._calls, BY_CALLS)
        if stops := self._stops_at(self._calls):
            self.stopped()
        return stops

    def stops_next(self) -> bool:
        """Whether the next call of `should_stop` returns True, on all ranks after the same step.

        So a script can save before that call. If it never calls `should_stop`, the answer is False.
        """
        if self.has_stopped or not self.supports_stop:
            return self.has_stopped
        return self._stops_at(self._calls + 1)

    def _stops_at(self, call: int) -> bool:
        """Whether all ranks stop at this call, or before. Waits for the decision if that may be so."""
        channel = self._session.channel
        is_alone = channel is None or channel.world.world_size == 1
        with self._lock:
            if is_alone and self.is_requested and self._step is None:
                self._decide(max(call, self._denied + 1))
            must_wait = self._step is None and self._proposed == call
        if must_wait:
            self._decided.wait()
        # A later proposal of this rank is a later step, and the decision is later, too.
        stops = self._step is not None and call >= self._step
        if not stops:
            self._denied = call
        return stops

    def stopped(self) -> None:
        """Record that this rank ends early with its work saved, on request or for another reason."""
        if not self.has_stopped:
            self.has_stopped = True
            self._session.send("stopped")
            self._session.tell_agent("stopped")

    def agree(self, channel: Coordinator) -> None:
        """Advance the agreement, without waiting. The channel's thread calls this after all news."""
        is_called = self.is_requested or channel.is_called(self._key)
        if channel.world.world_size == 1 or self._step is not None or not is_called:
            return
        self.is_requested = True
        self.propose_step(channel, _AHEAD)
        steps = channel.given(self._key)
        if steps is not None:
            with self._lock:  # a rank that had not called `should_stop` yet is gone, and gives none
                self._decide(max(step for step in steps if step is not None))

    def propose_step(self, channel: Coordinator, ahead: int) -> None:
        """Propose the step `ahead` of the present one, once, and do not pass it before the decision.

        A rank that leaves proposes its present step, with `ahead` 0.
        """
        with self._lock:
            if self._proposed is not None:
                return
            self._proposed = self._calls + ahead
        channel.give(self._key, self._proposed, calls=self.is_requested)

    def _decide(self, step: int) -> None:
        self._step = step
        self._decided.set()


def stop_on(stop: StopRequest, *numbers: signal.Signals, only_first: bool = False) -> None:
    """Treat these signals as requests to stop, unless the script, or nohup, handles them itself.

    SIGUSR1 comes from mpirun or srun. Batch systems send SIGTERM, and the launcher, which gets it too, limits
    the time. Without a launcher, `only_first` lets a second signal kill.
    """
    if threading.main_thread() is not threading.current_thread():
        return
    for number in numbers:
        before = signal.getsignal(number)
        if before in (signal.SIG_DFL, signal.default_int_handler):
            handler = partial(_on_signal, stop, before if only_first else None)
            signal.signal(number, handler)
            if not only_first:
                os.register_at_fork(after_in_child=partial(_restore, number, handler))


def _on_signal(stop: StopRequest, before: Any, number: int, frame: Any) -> None:
    stop.note_request()
    if before is not None:
        signal.signal(number, before)
        name = signal.Signals(number).name
        line = f"mpiddp: {name}: saving and stopping; another signal kills the training at once.\n"
        with contextlib.suppress(OSError):  # the Ctrl-C may have ended the reader of a pipe as well
            os.write(2, line.encode())


def _restore(number: signal.Signals, handler: object) -> None:
    """A forked child is no rank."""
    if signal.getsignal(number) is handler:
        signal.signal(number, signal.SIG_IGN if number == signal.SIGUSR1 else signal.SIG_DFL)


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
