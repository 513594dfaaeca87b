"""The state of this process as a rank of its job: one object, which is passed to the code that needs it.

    with reporting(world) as session:      # every command of a rank begins with this
        session.stop.declare_support()

Public functions that take no argument, such as should_stop() and init(), use `current()`.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from mpiddp.protocol.variables import ADDRESS, SCRIPT_SECRET, SECRET
from mpiddp.runtime.child_signals import leave_sigterm_to_rank
from mpiddp.runtime.control_client import ControlClient, connect
from mpiddp.runtime.coordinator import Coordinator
from mpiddp.runtime.ending import ending_of
from mpiddp.runtime.failure_watch import FailureWatch
from mpiddp.runtime.launcher_connection import AnotherScript
from mpiddp.runtime.output.rank_output import RankOutput, redirect_output
from mpiddp.runtime.process_setup import die_with_parent
from mpiddp.runtime.stop_request import StopRequest
from mpiddp.runtime.stop_signals import handle_sigterm
from mpiddp.world import World, is_joined


class RunFiles(Protocol):
    """The folder of a run, and its records."""

    @property
    def path(self) -> Path: ...

    def record(self, step: int, values: Mapping[str, Any]) -> None:
        """Append a record to metrics.jsonl, on the ranks that write there."""


class Session:
    """The state of one process. A process belongs to one job, so it has one session.

    `channel` and `output` are None without a launcher that listens. `coordinator` is None until the ranks
    have joined. They join once, because MPI cannot be initialized again after it is finalized. `watch` is
    set from then until they leave.
    """

    def __init__(self) -> None:
        self.channel: ControlClient | None = None
        self.output: RankOutput | None = None
        self.stop = StopRequest(send=self.send, progress=self._progress, declared=self._declared)
        self._saves = 0
        self._saves_lock = threading.Lock()
        self.coordinator: Coordinator | None = None
        self.watch: FailureWatch | None = None
        self.earlier_watch: FailureWatch | None = None
        self.run: RunFiles | None = None  # the folder of this process's run
        self._before_leaving: list[Callable[[], None]] = []
        self._savers: list[Callable[[], None]] = []
        self.launcher_address = ""
        self.script_secret = ""  # of all scripts, if this process is the script of a rank's command
        self.is_unjoined_script = False
        self._before_exit: list[Callable[[], None]] = []
        self._is_ending = threading.Event()
        self._pid = os.getpid()

    @property
    def is_of_this_process(self) -> bool:
        """False in a forked child, which is not a rank."""
        return os.getpid() == self._pid

    def send(self, kind: str, **fields: object) -> None:
        """Send the launcher a message, if there is a launcher."""
        if self.channel is not None:
            self.channel.send(kind, **fields)

    def exit_now(self, code: int) -> None:
        """End this process, because the job has ended. Any thread may."""
        self._is_ending.set()
        for end in self._before_exit:
            end()
        os._exit(code)

    def before_exit(self, end: Callable[[], None]) -> None:
        """Let `exit_now` call `end`, which ends what this process has started."""
        self._before_exit.append(end)

    def wait_if_ending(self) -> None:
        """Do not return if another thread ends this process."""
        if self._is_ending.is_set():
            threading.Event().wait()

    def before_leaving(self, finish: Callable[[], None]) -> None:
        """Call `finish` on every rank once its script has succeeded, before the ranks leave the job."""
        self._before_leaving.append(finish)

    def finish(self) -> None:
        """Make these calls, the latest first. Raises JobFailed if the script has not succeeded after all."""
        while self._before_leaving:
            self._before_leaving.pop()()

    def add_saver(self, wait: Callable[[], None]) -> None:
        """Let `wait_for_saves` call `wait`, which returns once this rank has no save in flight."""
        self._savers.append(wait)

    def wait_for_saves(self) -> None:
        """Wait until this rank has no save in flight, whether the saves succeed or not. Not a collective."""
        for wait in self._savers:
            wait()

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """See `mpiddp.saving`."""
        self._count_saves(1)
        try:
            yield
        finally:
            self._count_saves(-1)

    def _count_saves(self, difference: int) -> None:
        with self._saves_lock:
            before, self._saves = self._saves, self._saves + difference
            if bool(before) != bool(self._saves):
                self.send("saving", active=bool(self._saves))

    def stop_is_saved(self) -> None:
        """This rank has saved what a stop requires, and now waits for the other ranks."""
        with self._saves_lock:
            if not self._saves:
                self.send("saving", active=False)

    def _declared(self) -> None:
        """The script supports a stop: SIGTERM requests one too, while there is a launcher."""
        if self.channel is not None:
            handle_sigterm(self.stop)

    def _progress(self, step: int) -> None:
        if self.channel is not None:
            self.channel.progress(step)


_current: Session | None = None


def current() -> Session:
    """The session of this process. The first call creates it.

    In a command of a rank (`mpiddp run -- COMMAND`), the first process that calls it is the rank's script.

    Raises:
        JobFailed: this is a script, and the launcher cannot be reached.
    """
    global _current
    if _current is None:
        _current = Session()
        if SCRIPT_SECRET in os.environ and is_joined(os.environ):
            _connect_script(_current)
    return _current


def _connect_script(session: Session) -> None:
    """Connect the script of a rank's command to the launcher, if there is one.

    The rank reports its start and its end. The script reports the rest, and its error.
    """
    session.launcher_address = os.environ.pop(ADDRESS, "")
    session.script_secret = os.environ.pop(SCRIPT_SECRET)
    if not session.launcher_address:
        return
    with contextlib.suppress(AnotherScript):
        session.channel = connect(
            session.launcher_address,
            session.script_secret,
            World.from_env(),
            session.stop.request,
            is_script=True,
        )
        session.is_unjoined_script = True
        faulthandler.enable(2)
        atexit.register(_report_success, session)
        leave_sigterm_to_rank()
        sys.excepthook = partial(_report_uncaught, session, sys.excepthook)


def _report_uncaught(
    session: Session,
    print_error: Callable[..., object],
    kind: type[BaseException],
    error: BaseException,
    traceback: TracebackType | None,
) -> None:
    print_error(kind, error, traceback)
    if session.channel is not None:  # it is None in a forked child
        if session.coordinator is not None:
            session.channel.is_first = session.coordinator.claim_first_failure()
        _report(session.channel, error, session.stop)


def _report(channel: ControlClient, error: BaseException, stop: StopRequest) -> None:
    """Report to the launcher how this rank failed. A normal end is reported later."""
    ending = ending_of(error, has_stopped=stop.has_stopped)
    if ending.is_failure:
        channel.failed(ending)


def _forget() -> None:
    global _current
    if _current is not None:
        _current.channel = _current.output = None  # for code that holds the session
    _current = None


os.register_at_fork(after_in_child=_forget)


def saving() -> contextlib.AbstractContextManager[None]:
    """Within the body, this rank saves its work: after a request to stop, it has time until --save-grace.

    `should_stop()` declares the same when it returns True, until the script ends. So this is for saves
    that may be under way when a stop is requested. Without `mpiddp launch` it does nothing.

        with mpiddp.saving():
            torch.save(model.state_dict(), path)

    Bodies may be nested, and may run in several threads at once. `mpiddp.Checkpoints` needs none.
    """
    return current().saving()


@contextlib.contextmanager
def reporting(world: World) -> Iterator[Session]:
    """Report this rank's start and its end to the launcher, if there is one.

    With or without a launcher, a crash prints its stacks, and a rank ends with the daemon that started it.
    A rank has succeeded only when its other threads and its handlers of atexit have ended too.

    Raises:
        JobFailed: the launcher cannot be reached.
    """
    session = current()
    faulthandler.enable(2)  # a crash in native code prints the Python stack on stderr
    if world.launcher.speaks_mpi or world.launcher.name == "slurm":
        die_with_parent()  # without the daemon of MPI or Slurm, nothing would end this rank
    # Hide them from the processes that the script starts: these are not ranks.
    address, secret = os.environ.pop(ADDRESS, ""), os.environ.pop(SECRET, "")
    if not address or not secret:
        yield session
        return
    session.output = redirect_output(world, address, secret)
    session.launcher_address = address
    session.channel = connect(
        address, secret, world, session.stop.request, exit_now=session.exit_now
    )
    session.send("started", host=world.hostname, pid=os.getpid())
    atexit.register(_report_success, session)  # before those of the script, so it runs after them
    leave_sigterm_to_rank()
    if session.output is not None and world.launcher.name == "slurm":
        atexit.register(_drain, session.output)
    try:
        if session.output is not None and (log := session.output.log_to_named_folder()):
            session.send("log", path=str(log))
        yield session
    except BaseException as error:
        if session.channel is not None:  # it is None in a forked child
            _report(session.channel, error, session.stop)
        raise


def _report_success(session: Session) -> None:
    if session.channel is not None:  # it is None in a forked child
        session.channel.done()


def _drain(output: RankOutput) -> None:
    """Send the last lines before this process ends."""
    if current().output is output:  # not in a forked child
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed by the script
                stream.flush()
        output.drain()
