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
from pathlib import Path
from typing import Any, Protocol

from mpiddp.errors import (
    BAD_INPUT,
    FAILED,
    JobFailed,
    UserError,
    missing_package,
    package_we_lack,
)
from mpiddp.hosts.versions import package_version
from mpiddp.protocol import ADDRESS, ERROR_FILE, SECRET, recorded_error
from mpiddp.runtime.control_client import ControlClient, connect
from mpiddp.runtime.coordinator import Coordinator, Refused
from mpiddp.runtime.failure_watch import FailureWatch
from mpiddp.runtime.process_setup import die_with_parent
from mpiddp.runtime.stop_request import StopRequest
from mpiddp.runtime.stop_signals import handle_sigterm
from mpiddp.world import World


class RunFiles(Protocol):
    """The folder of a run, and its records."""

    @property
    def path(self) -> Path: ...

    def record(self, step: int, values: Mapping[str, Any]) -> None:
        """Append a record to metrics.jsonl, on the ranks that write there."""


class Session:
    """The state of one process. A process belongs to one job, so it has one session.

    `channel` is None without a launcher that listens. `coordinator` is None until the ranks have joined.
    They join once, because MPI cannot be initialized again after it is finalized. `watch` is set from
    then until they leave.
    """

    def __init__(self) -> None:
        self.channel: ControlClient | None = None
        self.stop = StopRequest(send=self.send, progress=self._progress, declared=self._declared)
        self._saves = 0
        self._saves_lock = threading.Lock()
        self.coordinator: Coordinator | None = None
        self.watch: FailureWatch | None = None
        self.run: RunFiles | None = None  # the folder of this process's run
        self._before_leaving: list[Callable[[], None]] = []
        self._pid = os.getpid()

    @property
    def is_of_this_process(self) -> bool:
        """False in a forked child, which is not a rank."""
        return os.getpid() == self._pid

    def send(self, kind: str, **fields: object) -> None:
        """Send the launcher a message, if there is a launcher."""
        if self.channel is not None:
            self.channel.send(kind, **fields)

    def before_leaving(self, finish: Callable[[], None]) -> None:
        """Call `finish` on every rank once its script has succeeded, before the ranks leave the job."""
        self._before_leaving.append(finish)

    def finish(self) -> None:
        """Make these calls, the latest first. Raises JobFailed if the script has not succeeded after all."""
        while self._before_leaving:
            self._before_leaving.pop()()

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
    """The session of this process. The first call creates it."""
    global _current
    if _current is None:
        _current = Session()
    return _current


def _forget() -> None:
    global _current
    if _current is not None:
        _current.channel = None  # for code that holds the session
    _current = None


os.register_at_fork(after_in_child=_forget)


def should_stop() -> bool:
    """Whether to save and leave now, because the job was requested to stop.

    Every rank must call this once in every step, at the same point of its loop. All ranks get True after
    the same step, and leave with `sys.exit(75)` or at the end of the script. A call takes microseconds.
    No rank waits for another, except in the one or two steps after a request.
    """
    return current().stop.should_stop()


def saving() -> contextlib.AbstractContextManager[None]:
    """Within the body, this rank saves its work: after a request to stop, it has time until --save-grace.

    `should_stop()` declares the same when it returns True, until the script ends. So this is for saves
    that may be under way when a stop is requested. Without `mpiddp launch` it does nothing.

        with mpiddp.saving():
            torch.save(model.state_dict(), path)
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
    session.channel = connect(address, secret, world, session.stop.request)
    versions = {package: package_version(package) for package in ("torch", "mpi4py")}
    session.send(
        "started",
        host=world.hostname,
        pid=os.getpid(),
        versions={"python": sys.version.split()[0], **versions},
    )
    atexit.register(_report_success, session)  # before those of the script, so it runs after them
    try:
        yield session
    except BaseException as error:
        if session.channel is not None:  # it is None in a forked child
            _report_failure(session.channel, error, session.stop)
        raise


def _report_success(session: Session) -> None:
    if session.channel is not None:  # it is None in a forked child
        session.channel.done()


def _report_failure(channel: ControlClient, error: BaseException, stop: StopRequest) -> None:
    """Report to the launcher how this rank failed. A normal end is reported later."""
    if isinstance(error, Refused) and error.sentence:
        channel.failed(FAILED, error.sentence, is_verdict=True)
    elif isinstance(error, SystemExit):
        if error.code and not stop.is_requested_end(error.code):
            code = error.code if isinstance(error.code, int) else 1
            said = "" if isinstance(error.code, int) else str(error.code)
            channel.failed(code, said or recorded_error(os.environ.get(ERROR_FILE, "")))
    elif isinstance(error, JobFailed):
        channel.failed(FAILED, str(error), is_verdict=True)
    elif isinstance(error, UserError):
        channel.failed(BAD_INPUT, str(error))
    elif package := package_we_lack(error):
        channel.failed(BAD_INPUT, missing_package("a rank", package))
    else:
        import traceback  # takes 5 ms, and few ranks need it

        channel.failed(1, _describe(error), traceback.format_exc())


def _describe(error: BaseException) -> str:
    """ "RuntimeError: a bug", or "KeyError" for an error without text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
