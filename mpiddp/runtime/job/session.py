"""The state of this process as a rank of its job, and what it tells its launcher and its agent.

Under `mpiddp launch` and `mpiddp run` a rank has an agent, which reports how it ends, and the script has a
channel of its own to the server of the job. By hand (mpirun, srun, torchrun) the process is the rank itself:
it joins and leaves, and its parent sees how it ends.

All ranks stop after the same step, and exchange messages only after a request to stop. Then each rank
proposes a step slightly ahead, in a gather to which the first calls the others. A rank does not pass its own
step before the decision. All ranks stop at the highest proposed step, which no rank has passed.
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
from pathlib import Path
from typing import Any

from mpiddp.errors import print_error
from mpiddp.protocol.channel import LARGEST_WHOLE, SCRIPT, TEXT_LIMIT, encode
from mpiddp.protocol.variables import CHANNEL, CHANNEL_SECRET, ERROR_FILE, JOB, LOG_DIR
from mpiddp.runtime.job.coordinator import AnotherScript, Coordinator, Server
from mpiddp.runtime.job.ending import ending_of, record
from mpiddp.world import World, is_joined

BY_OPTIMIZER, BY_CALLS, BY_SCRIPT = range(3)  # who counts the steps; the last one is right
# What a script says of its training: values, and the bytes of each, with its name, in the message.
_MOST_SHOWN, _LONGEST_SHOWN = 16, 280
PROGRESS_EVERY_S = 0.5
_AHEAD = 2  # steps; no rank waits if they take longer than the agreement
_NEVER = float("inf")
_END_S = 2.0  # for this rank to be ended after another has failed
_ONLY_FIRST = "mpiddp: %s: saving and stopping; another signal kills the training at once.\n"


class Session:
    """The state of one process. A process belongs to one job, so it has one session."""

    def __init__(self) -> None:
        # This process is the script of a rank, whose agent reports its end. By hand it is the rank itself.
        self.has_agent = is_joined(os.environ)
        self.control: socket.socket | None = None  # to the agent, unless that has started a command
        # It has host names once the ranks have joined. They join once: MPI cannot be initialized again.
        self.coordinator = Coordinator(World(0, 1, 0, 1), None)
        self.is_member = False  # of the process group of its job, which this process leaves later
        self.run: Any = None  # the `mpiddp.checkpoints.records.RunRecords` of this process's run
        self.torch_store: object = None  # rank 0 serves it as long as its process lives
        self.error: BaseException | None = None  # that has ended the script, or by hand its group
        self.stop = StopRequest(self)
        # Calls on every rank, the latest first, once its script has succeeded.
        self.before_leaving: list[Callable[[], None]] = []
        self.savers: list[Callable[[], None]] = []  # each waits for this rank's saves of one kind
        self._saves = 0
        self._lock = threading.RLock()
        self._step = 0  # the latest step of this rank
        self._counter = BY_OPTIMIZER
        self._sent_at = 0.0
        self._shown: dict[str, Any] = {}  # that has not been sent

    @property
    def has_launcher(self) -> bool:
        """Whether `mpiddp launch` listens."""
        return self.coordinator.has_launcher

    def obey(self, facts: Mapping[str, Any]) -> None:
        """Act on news: of the launcher, or a call. The agent ends this process, so "end" is none of them."""
        number = facts.get("signal", signal.SIGTERM)
        if facts["type"] == "stop":  # before it can end of this
            self.tell_agent("stopping", signal=number)
        match facts["type"]:
            case "stop" if not self.stop.supports_stop:
                # Without should_stop(), the handler of a request would only note it.
                if signal.getsignal(number) in self.stop.handlers:
                    number = signal.SIGTERM
                os.kill(os.getpid(), number)
            case "stop" | "called":
                self.stop.is_requested = True
            case "stacks" | "calls" as kind:
                with contextlib.suppress(OSError):  # no file is left, not even to import
                    from mpiddp.hosts.processes import usage_of
                    from mpiddp.runtime.collectives import calls

                    if (made := calls()) is not None:
                        self.send("calls", **made)
                    if kind == "stacks":
                        self.send("stacks", text=_stacks(), **usage_of(os.getpid()))

    def send(self, kind: str, **facts: object) -> None:
        """Send the launcher a message, if there is a launcher."""
        if self.has_launcher:
            self.coordinator.send(kind, b"", **facts)

    def tell_agent(self, kind: str, **facts: object) -> None:
        """Tell the agent that has started this script, if one has."""
        if self.control is not None:
            with contextlib.suppress(OSError):  # the script has closed it
                self.control.sendall(encode(kind, b"", **facts))

    def count(self, step: int, counter: int) -> None:
        """Report this step by one who counts, at most twice a second. Most calls send nothing.

        Several optimizers may count one step. A launcher that is stopped (Ctrl-Z) reads nothing, and the
        script goes on: while the connection has no room, no step is reported.
        """
        if counter < self._counter or (counter == BY_OPTIMIZER and step <= self._step):
            return
        self._counter, self._step = counter, step
        now = time.monotonic()
        if now - self._sent_at >= PROGRESS_EVERY_S and self.coordinator.has_room:
            self._sent_at = now
            self.send("progress", step=step, shown=self._shown, **_usage())
            self._shown = {}

    def show(self, values: Mapping[str, Any]) -> None:
        """Send these values of the training with the next progress, but those that cannot be shown."""
        for name, value in values.items():
            if type(value) not in (bool, int) and isinstance(value, numbers.Real):  # numpy's
                value = int(value) if isinstance(value, numbers.Integral) else float(value)
            has_room = name in self._shown or len(self._shown) < _MOST_SHOWN
            is_whole = type(value) is int and abs(value) <= LARGEST_WHOLE
            is_shown = has_room and (is_whole or type(value) in (float, str))
            if is_shown and len(json.dumps({name: value})) <= _LONGEST_SHOWN:
                self._shown[name] = value

    def log_to(self, folder: Path) -> None:
        """Let the agent write all output to files in `folder`, unless the user has named another one."""
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

    def leave(self, *, waits: bool | None = None) -> None:
        """Leave the job after a success, see `Coordinator.leave`. All ranks must call this."""
        if self.stop.has_stopped:
            self.count_saves(0)
        # The first rank that exits with a code other than 0 ends the others, which may still save.
        self.coordinator.leave(waits=self.stop.has_stopped or waits)

    def fail(self, error: BaseException, *, is_printed: bool = False) -> None:
        """Say why this script fails: record it for the agent, and print what only a rank can print.

        The first rank to fail says what is wrong; errors of connections follow from it, and would only hide
        it. `is_printed`: Python has printed the error.
        """
        # A save in flight goes on after sys.exit(), because the agent ends the others. A claim ends it.
        is_first = isinstance(error, SystemExit) or self.coordinator.claim_first_failure()
        ending = ending_of(error)
        if self.has_agent:
            record(ending, os.environ.get(ERROR_FILE, ""))
        is_sentence = ending.is_refusal or ending.is_verdict
        prints = ending.is_refusal or (is_sentence and not self.has_agent)
        if is_first and prints and not (is_printed or self.has_launcher):
            print_error(ending.error)
        elif not (is_first or is_printed) and (is_sentence or isinstance(error, RuntimeError)):
            self.tell_over(ending.code)
            time.sleep(_END_S)

    def tell_over(self, code: int) -> None:
        """Tell the agent that this script, which has failed, has no more to do than to end."""
        if self.control is not None:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):  # the script may have closed or replaced it
                    stream.flush()
            self.tell_agent("over", code=code)

    def tell_over_at_exit(self) -> None:
        """Tell the agent that all handlers of atexit have run. Python takes long to clear its modules."""
        if self.error is not None and (ending := ending_of(self.error)).is_failure:
            self.tell_over(ending.code)

    def fail_at_exit(self) -> None:
        """Record the error that has ended the script of a command, which Python has printed."""
        error = getattr(sys, "last_value", None)
        if error is not None and self is current():  # no forked child
            self.fail(error, is_printed=True)


class StopRequest:
    """The state of a requested stop in this process. Its steps are the calls of `should_stop`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._changed = threading.Condition()  # its lock: a handler of a signal may call os._exit
        self._calls = 0
        self.steps_before = 0  # of the run, which another process has made
        self._proposed = 0  # the step that this rank has proposed
        self._step = _NEVER  # after which all ranks stop, once it is decided
        self.has_stopped = False  # this script ends early, as requested
        # A plain flag: a signal handler that waits for a lock could wait for its own thread. The next call of
        # any rank begins the agreement, and calls the others to it.
        self.is_requested = False
        self.supports_stop = False  # whether the script calls `should_stop`
        self.handlers: list[object] = []  # of signals, see `stop_on`

    def declare_support(self) -> None:
        """Declare that this script calls `should_stop`, so that an earlier request waits for the call."""
        if not self.supports_stop:
            self.supports_stop = True
            self._session.send("supports_stop")
            if self._session.has_launcher:
                stop_on(self, signal.SIGTERM)

    def should_stop(self) -> bool:
        """See `mpiddp.should_stop`."""
        self.declare_support()
        with self._changed:
            self._calls += 1
        self._session.count(self.steps_before + self._calls, BY_CALLS)
        if stops := self._stops_at(self._calls):
            self.stopped()
        return stops

    def stops_next(self) -> bool:
        """Whether the next call of `should_stop` returns True, on all ranks after the same step.

        So a script can save before that call. If it never calls `should_stop`, the answer is False.
        """
        return self.has_stopped or (self.supports_stop and self._stops_at(self._calls + 1))

    def _stops_at(self, call: int) -> bool:
        """Whether all ranks stop at this call, or before. Waits for the decision if that may be so."""
        with self._changed:
            self.agree()
            while self._step == _NEVER and self._proposed == call:
                self._changed.wait()
            # A later proposal of this rank is a later step, and the decision is later, too.
            return call >= self._step

    def stopped(self) -> None:
        """Record that this rank ends early with its work saved, on request or for another reason."""
        if not self.has_stopped:
            self.has_stopped = True
            self._session.send("stopped")
            self._session.tell_agent("stopped")

    def agree(self) -> None:
        """Advance the agreement, without waiting: at each call, and in the thread that receives, after news.

        A rank that has left its process group proposes as well. One that is gone gives no step.
        """
        ranks = self._session.coordinator
        with self._changed:
            if not self.is_requested or self._step != _NEVER:
                return
            if not self._proposed:
                self._proposed = self._calls + _AHEAD
                ranks.give("stop", self._proposed)
            is_alone = ranks.world.world_size == 1 or ranks.is_lost
            steps = [self._proposed] if is_alone else ranks.given("stop")
            if steps is not None:
                self._step = max(step for step in steps if step is not None)
                self._changed.notify_all()


def stop_on(stop: StopRequest, *numbers: signal.Signals, only_first: bool = False) -> None:
    """Treat these signals as requests to stop, unless the script, or nohup, handles them itself.

    SIGUSR1 comes from mpirun or srun. Batch systems send SIGTERM, and the launcher, which gets it too, limits
    the time. Without a launcher, `only_first` lets a second signal kill.
    """
    defaults = (signal.SIG_DFL, signal.default_int_handler)
    before = {each: found for each in numbers if (found := signal.getsignal(each)) in defaults}

    def on_signal(number: int, frame: object) -> None:
        stop.is_requested = True
        if only_first:
            signal.signal(number, before[signal.Signals(number)])
            # The Ctrl-C may have ended the reader of a pipe as well.
            with contextlib.suppress(OSError):
                os.write(2, (_ONLY_FIRST % signal.Signals(number).name).encode())

    def restore() -> None:
        """A forked child is no rank."""
        for number in before:
            if signal.getsignal(number) is on_signal:
                ignores = number == signal.SIGUSR1
                signal.signal(number, signal.SIG_IGN if ignores else signal.SIG_DFL)

    if before and threading.main_thread() is threading.current_thread():
        stop.handlers.append(on_signal)
        for number in before:
            signal.signal(number, on_signal)
        if not only_first:
            os.register_at_fork(after_in_child=restore)


_current = Session()


def current() -> Session:
    """The session of this process."""
    return _current


def script_session() -> Session:
    """The session of this process. Raises JobFailed if the server of its job cannot be reached.

    In a command of a rank (`mpiddp run -- COMMAND`), the first process that calls a function of mpiddp is the
    rank's script.
    """
    session = current()
    if not session.coordinator.connection and CHANNEL in os.environ and session.has_agent:
        with contextlib.suppress(AnotherScript):
            server = Server(os.environ[CHANNEL], os.environ.get(CHANNEL_SECRET, ""), is_own=True)
            session.coordinator = Coordinator(World.from_env(), server, SCRIPT)
            session.coordinator.has_launcher = JOB in os.environ
            session.coordinator.listen(session.obey, session.stop.agree)
            if session.control is None:
                atexit.register(session.fail_at_exit)
    return session


def _forget() -> None:
    global _current
    before, _current = _current, Session()
    # Code may hold the session.
    before.coordinator, before.control = _current.coordinator, None


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


def _stacks() -> str:
    """The Python stacks of all threads of this process except this one, the main thread's first."""
    import traceback  # takes 5 ms

    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = {
        ident: f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    }
    # The end of a long stack is where the thread is.
    first = stacks.pop(threading.main_thread().ident or 0, "")[-TEXT_LIMIT:]
    return "\n".join([first, *stacks.values()])[:TEXT_LIMIT]
