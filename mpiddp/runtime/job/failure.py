"""When one rank fails, all ranks end, and one line names the rank. This works without a launcher.

Open MPI and srun end the other ranks after a non-zero exit, MPICH only after a signal, and Intel MPI after
neither once MPI is finalized. A rank inside an NCCL collective notices nothing by itself. So the thread of
every rank's channel waits for the news of the job. Under `mpiddp run` the agents do all of this.

Python keeps an uncaught error in `sys.last_value` for the handlers of atexit, but not the SystemExit that
ends a script (CPython 3.10 to 3.13). The script's outermost frame shows that there was one: otherwise the
frame's last instruction is a return. Its code is the process's own, which the parent sees.
tests/integration/runtime/test_still_needed.py fails once Python keeps it.
"""

from __future__ import annotations

import atexit
import contextlib
import dis
import os
import signal
import sys
import threading
import traceback
from contextlib import AbstractContextManager
from functools import partial
from types import FrameType
from typing import NoReturn, TypeVar

from mpiddp.errors import FAILED, print_error
from mpiddp.runtime.job.channel import JobChannel
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.job.ending import Ending, ending_of
from mpiddp.runtime.job.session import Session, current
from mpiddp.runtime.job.stop import stop_on

Value = TypeVar("Value")

GRACE_S = 1.0  # in which a rank may end by itself once another has failed


class ExitUnknown(SystemExit):
    """The script has ended by a SystemExit whose code nobody knows but its parent."""


class FailureWatch:
    """Ends this process when another rank fails, and ends the other ranks when this one fails.

    The script of an agent leaves all ends to it.
    """

    def __init__(self, session: Session, coordinator: Coordinator) -> None:
        self._session = session
        self._coordinator = coordinator
        self._channel = coordinator.channel
        self._is_rank = session.channel is None or not session.channel.group
        self._is_over = threading.Event()

    def start(self) -> None:
        stop_on(self._session.stop, signal.SIGUSR1)
        channel = self._channel
        if self._is_rank and channel is not None and self._coordinator.world.world_size > 1:
            channel.listen(lambda facts: None, partial(self._look, channel))

    def stop(self) -> None:
        """This rank has left."""
        self._is_over.set()

    def fail(self, ending: Ending) -> None:
        """This rank has failed: say so, and end the others.

        The first rank to fail says it. Without a traceback to print, the others wait to be ended.
        """
        is_first = self._coordinator.claim_first_failure()
        if is_first:
            self._print_once(ending)
        elif self._is_rank and (ending.is_verdict or ending.is_refusal) and self._channel:
            self._is_over.wait(2 * GRACE_S)
        self.stop()
        if self._is_rank and self._channel is not None:
            self._channel.fail(ending.code)

    def fail_at_exit(self) -> None:
        """Python has printed the error that ended the script."""
        error = getattr(sys, "last_value", None)
        if error is not None and self._session.is_of_this_process and not self._is_over.is_set():
            self.fail(ending_of(error))

    def _print_once(self, ending: Ending) -> None:
        """Print the line of an ending. A launcher prints every line, an agent all but that of bad input."""
        world = self._coordinator.world
        line = ending.line(f"rank {world.rank} on {world.hostname}")
        prints = self._is_rank or (ending.is_refusal and not self._session.has_launcher)
        if line and prints and not self._session.has_printed:
            self._session.has_printed = True
            print_error(line)

    def _look(self, channel: JobChannel) -> None:
        """Agree on a stop, or end with the rank that has failed. The thread of the channel calls this."""
        if self._is_over.is_set():
            return
        if not (channel.code_of_failure or channel.is_lost):
            self._session.stop.agree(channel)
            return
        if self._is_over.wait(GRACE_S):
            return
        world = self._coordinator.world
        if not channel.code_of_failure and world.local_rank == 0:
            rank = f"rank {world.rank} on {world.hostname}"
            lost = f"{rank} lost the connection to rank 0; exiting"
            self._print_once(Ending(FAILED, lost, is_verdict=True))
        with contextlib.suppress(Exception):  # a script may replace stdout by anything
            sys.stdout.flush()
        os._exit(channel.code_of_failure or FAILED)


def enter_until_exit(context: AbstractContextManager[Value]) -> Value:
    """Enter the context, and leave it when the interpreter exits, with the error that ended the script."""
    value = context.__enter__()
    outermost = sys._getframe()
    while outermost.f_back is not None:
        outermost = outermost.f_back

    def leave() -> None:
        error = _ending_error(outermost)
        try:
            context.__exit__(type(error) if error else None, error, None)
        except SystemExit as end:
            # Python ignores the code of a handler. The script has succeeded, but its last save has not; or
            # its error is a sentence that has been printed.
            if not isinstance(error, ExitUnknown) and not ending_of(error).traceback:
                exit_now(end.code)
        except BaseException:  # Python would print it, and end with the script's own code
            traceback.print_exc()
            exit_now(FAILED)

    atexit.register(leave)
    return value


def exit_now(code: object) -> NoReturn:
    """End the process with this code, without the remaining handlers of atexit."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a script may replace them by anything
            stream.flush()
    os._exit(code if isinstance(code, int) else 1)


def _ending_error(outermost: FrameType) -> BaseException | None:
    """The exception that has ended the script with this frame, None if it ran to its end."""
    session = current()
    if session.control is not None:
        return session.error
    error: BaseException | None = getattr(sys, "last_value", None)
    last_instruction = dis.opname[outermost.f_code.co_code[outermost.f_lasti]]
    if error is None and not last_instruction.startswith("RETURN"):
        return ExitUnknown()
    return error
