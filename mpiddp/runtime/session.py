"""What this process holds as a rank of its job, in one object that is passed to those who need it.

    with reporting(world) as session:      # what every verb of a rank begins with
        session.stop.declare_support()

`current()` is for the public functions that take no argument: should_stop(), init().
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
from collections.abc import Iterator

from mpiddp.errors import BAD_INPUT, UserError
from mpiddp.hosts.versions import package_version
from mpiddp.protocol import ADDRESS, SECRET
from mpiddp.runtime.control_client import ControlClient, connect
from mpiddp.runtime.coordinator import Coordinator
from mpiddp.runtime.failure_watch import FailureWatch
from mpiddp.runtime.process_setup import die_with_parent
from mpiddp.runtime.stop_request import StopRequest
from mpiddp.world import World


class Session:
    """One per process, as a process is in one job.

    `channel` is None without a launcher that listens. `coordinator` is there once the ranks have
    joined, which they do once: MPI cannot be started again when it is finalized. `watch` is there from
    then until they leave.
    """

    def __init__(self) -> None:
        self.channel: ControlClient | None = None
        self.stop = StopRequest(send=self.send, progress=self._progress)
        self.coordinator: Coordinator | None = None
        self.watch: FailureWatch | None = None
        self._pid = os.getpid()

    @property
    def is_of_this_process(self) -> bool:
        """False in a forked child, which is no rank."""
        return os.getpid() == self._pid

    def send(self, kind: str, **facts: object) -> None:
        """Tell the launcher, if there is one."""
        if self.channel is not None:
            self.channel.send(kind, **facts)

    def _progress(self, step: int) -> None:
        if self.channel is not None:
            self.channel.progress(step)


_current: Session | None = None


def current() -> Session:
    """This process's session, which the first call makes."""
    global _current
    if _current is None:
        _current = Session()
    return _current


def _forget() -> None:
    global _current
    if _current is not None:
        _current.channel = None  # for those who hold the session
    _current = None


os.register_at_fork(after_in_child=_forget)


def should_stop() -> bool:
    """Whether to save and leave now, because somebody asked the job to stop.

    To be called once in every step, by every rank and at the same point of its loop: all ranks get
    True after the same step, and leave with `sys.exit(75)` or simply at the end of the script. It
    costs microseconds; no rank waits for another one, except in the step or two after a request.
    """
    return current().stop.should_stop()


@contextlib.contextmanager
def reporting(world: World) -> Iterator[Session]:
    """The launcher, if there is one, hears of this rank's start and of its end, whatever that is.

    With or without one, a crash shows its stacks, and a rank ends with the daemon that started it.

    Raises:
        UserError: there is a launcher, but it cannot be reached.
    """
    session = current()
    faulthandler.enable(2)  # a crash in native code shows on stderr where Python was
    if world.launcher.speaks_mpi or world.launcher.name == "slurm":
        die_with_parent()  # its MPI's daemon, or Slurm's: with that gone, nobody would end this rank
    # Not for processes that the script starts: they are no ranks.
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
    try:
        yield session
    except BaseException as error:
        if session.channel is not None:  # as in a forked child
            _report(session.channel, error, session.stop)
        raise
    if session.channel is not None:
        session.channel.done()


def _report(channel: ControlClient, error: BaseException, stop: StopRequest) -> None:
    """Tell the launcher what ended this rank."""
    if isinstance(error, SystemExit):
        if error.code and not stop.is_requested_end(error.code):
            code = error.code if isinstance(error.code, int) else 1
            channel.failed(code, "" if isinstance(error.code, int) else str(error.code))
        else:
            channel.done()
    elif isinstance(error, UserError):
        channel.failed(BAD_INPUT, str(error))
    else:
        import traceback  # 5 ms that most ranks never need

        channel.failed(1, _describe(error), traceback.format_exc())


def _describe(error: BaseException) -> str:
    """ "RuntimeError: a bug", or "KeyError" for an error without a text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
