"""Connect this process to its launcher: as a rank, or as the script within the command of a rank.

with connected(world) as session:      # every command of a rank begins with this
    session.stop.declare_support()
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import operator
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from mpiddp.errors import JobFailed
from mpiddp.protocol.channel import SCRIPT
from mpiddp.protocol.variables import ADDRESS, CHANNEL, CHANNEL_SECRET, SCRIPT_SECRET, SECRET
from mpiddp.runtime.job.channel import connect
from mpiddp.runtime.job.connect import Server
from mpiddp.runtime.job.ending import ending_of
from mpiddp.runtime.job.session import Session, current
from mpiddp.runtime.job.stop import leave_sigterm_to_rank
from mpiddp.world import World, is_joined

if TYPE_CHECKING:
    from mpiddp.runtime.launcher.output import RankOutput


@contextlib.contextmanager
def connected(world: World) -> Iterator[Session]:
    """Report this rank's start and its end to the launcher, if there is one.

    With or without a launcher, a crash prints its stacks, and a rank ends with the daemon that started it.
    A rank has succeeded only when its other threads and its handlers of atexit have ended too.

    Raises:
        JobFailed: the launcher cannot be reached.
    """
    session = current()
    faulthandler.enable(2)  # a crash in native code prints the Python stack on stderr
    if world.launcher.speaks_mpi or world.launcher.name == "slurm":
        from mpiddp.hosts.processes import signal_at_parents_end

        # Without the daemon of MPI or Slurm, nothing would end this rank.
        signal_at_parents_end(signal.SIGKILL)
    _report_early_ends(session, drains=world.launcher.name == "slurm")
    if is_joined(os.environ):
        # A rank's command, or a process that it has started: `join` connects the first as the rank's script.
        yield session
        return
    # Hide them from the processes that the script starts: these are not ranks.
    address, secret = os.environ.pop(ADDRESS, ""), os.environ.pop(SECRET, "")
    if not address or not secret:
        yield session
        return
    try:
        _connect(session, world, Server(address, secret))
        yield session
    except BaseException as error:
        ending = ending_of(error, has_stopped=session.stop.has_stopped)
        session.report(ending)
        if isinstance(error, JobFailed) and session.launcher is not None:
            raise SystemExit(ending.code) from None  # the launcher prints it
        raise


def _connect(session: Session, world: World, server: Server) -> None:
    from mpiddp.runtime.launcher.client import LauncherClient
    from mpiddp.runtime.launcher.output import redirect_output, take_stdin

    output = session.output = redirect_output(world, server)
    channel = session.channel = connect(server, world, session.stop.wakes)
    session.launcher = LauncherClient(channel, world, session.stop.request, session.exit_now)
    session.send("started", host=world.hostname, pid=os.getpid(), **_memory_group())
    take_stdin(world, server)
    atexit.register(_report_success, session)  # before those of the script, so it runs after them
    leave_sigterm_to_rank()
    if output is not None and world.launcher.name == "slurm":
        atexit.register(_drain, output)
    if output is not None and (log := output.log_to_named_folder()):
        session.send("log", path=str(log))


def _memory_group() -> dict[str, object]:
    """What tells the launcher later whether the kernel killed this rank for lack of memory."""
    from mpiddp.hosts.processes import group_of, kills_in

    folder = group_of()
    kills = None if folder is None else kills_in(folder)
    return {} if kills is None else {"memory_group": str(folder), "oom_kills": kills.count}


def script_session() -> Session:
    """The session of this process, which is connected first if it is the script of a rank's command.

    The public functions use it. In a command of a rank (`mpiddp run -- COMMAND`), the first process that
    calls it is the rank's script. The rank reports its start and its end; the script reports the rest, and
    its error.

    Raises:
        JobFailed: the launcher cannot be reached.
    """
    session = current()
    if SCRIPT_SECRET not in os.environ or not is_joined(os.environ):
        return session
    address, secret = os.environ.pop(ADDRESS, ""), os.environ.pop(SCRIPT_SECRET)
    if address:
        # What this process starts is no script of the rank.
        os.environ.update({CHANNEL: address, CHANNEL_SECRET: secret})
        _connect_script(session, Server(address, secret))
    return session


def _connect_script(session: Session, server: Server) -> None:
    from mpiddp.runtime.job.connect import AnotherScript
    from mpiddp.runtime.launcher.client import LauncherClient

    with contextlib.suppress(AnotherScript):
        world = World.from_env()
        channel = session.channel = connect(server, world, session.stop.wakes, role=SCRIPT)
        session.launcher = LauncherClient(channel, world, session.stop.request)
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
    session.claim_first_failure()
    session.report(ending_of(error, has_stopped=session.stop.has_stopped))


def _report_early_ends(session: Session, *, drains: bool) -> None:
    """Let Python's `os._exit` and `os.exec…` tell the launcher first what becomes of this rank.

    Programs end by `os._exit` to skip slow destructors, and start themselves again by `os.execv` to set a
    variable of OpenMP or of an allocator. No handler of atexit runs then, and without a report a rank counts
    as killed. Only a process's parent learns its exit code. A rank's is a daemon of MPI or Slurm, and not all
    tell.

    Args:
        drains: the output has to be with the launcher before this process ends.
    """
    end_process = os._exit

    def _exit(status: int) -> NoReturn:
        # As os._exit does. It refuses None, and then nothing ends here.
        status = operator.index(status)
        if session.is_of_this_process:
            with contextlib.suppress(Exception):
                session.exit_early(
                    ending_of(SystemExit(status), has_stopped=session.stop.has_stopped)
                )
                if session.output is not None and drains:
                    session.output.drain()
        end_process(status)

    os._exit = _exit
    # All functions of the family call one of these two.
    os.execv, os.execve = _reporting(session, os.execv), _reporting(session, os.execve)


def _reporting(
    session: Session, replace_process: Callable[..., NoReturn]
) -> Callable[..., NoReturn]:
    def replace(*args: Any, **named: Any) -> NoReturn:
        if not session.is_of_this_process:
            replace_process(*args, **named)
        with session.replaced():
            # The other program would inherit what this one's handler needs.
            blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
            try:
                replace_process(*args, **named)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    return replace


def _report_success(session: Session) -> None:
    if session.launcher is not None:  # it is None in a forked child
        session.launcher.done()


def _drain(output: RankOutput) -> None:
    """Send the last lines before this process ends."""
    if current().output is output:  # not in a forked child
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed by the script
                stream.flush()
        output.drain()


def saving() -> contextlib.AbstractContextManager[None]:
    """Within the body, this rank saves its work: after a request to stop, it has up to 10 minutes.

    `should_stop()` declares the same when it returns True, until the script ends. So this is for saves
    that may be under way when a stop is requested. Without `mpiddp launch` it does nothing.

        with mpiddp.saving():
            torch.save(model.state_dict(), path)

    Bodies may be nested, and may run in several threads at once. `mpiddp.Checkpoints` needs none.
    """
    return script_session().saving()
