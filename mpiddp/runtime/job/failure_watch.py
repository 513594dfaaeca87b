"""When one rank fails, all ranks end, and one line names the rank. This works without a launcher.

Open MPI and srun end the other ranks after a non-zero exit, MPICH only after a signal, and Intel MPI after
neither once MPI is finalized. A rank inside an NCCL collective notices nothing by itself. So a thread
of every rank waits for the news of the job's channel.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType

from mpiddp.errors import FAILED, print_error
from mpiddp.runtime.job.channel import WHOLE_JOB, ChannelLost, JobChannel
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.job.ending import Ending, ending_of
from mpiddp.runtime.job.stop import StopRequest, handle_sigusr1, unblock_sigusr1

_GRACE_S = 1.0  # in which a launcher may end this rank first


class FailureWatch:
    """Ends this process when another rank fails, and ends the other ranks when this one fails.

    It also agrees with the other ranks on the step of a requested stop. An error within a stay ends the ranks
    that are in it, and all others unless the script catches it.

    Args:
        has_launcher: whether a launcher names the rank that failed; it does so once and in more detail.
        exit_now: ends this process. The thread calls it.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        stop: StopRequest,
        *,
        has_launcher: bool,
        exit_now: Callable[[int], object] = os._exit,
    ) -> None:
        self._coordinator = coordinator
        self._channel = coordinator.channel
        self._stop = stop
        self._has_launcher = has_launcher
        self._stay = coordinator.begin_stay()
        stop.enter(self._stay)
        self._has_left = False
        self._exit_now = exit_now
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._previous_excepthook = sys.excepthook
        self._pid = os.getpid()
        self._has_printed = False  # the sentence of an error

    def start(self) -> None:
        sys.excepthook = self._excepthook
        atexit.register(self.stop)
        handle_sigusr1(self._stop)
        self._thread.start()

    def stop(self) -> None:
        self._end_watch()
        atexit.unregister(self.stop)
        if sys.excepthook == self._excepthook:
            sys.excepthook = self._previous_excepthook
        if self._thread.is_alive():
            self._thread.join()

    def leave(self) -> None:
        """This rank leaves with an error, which its script may catch: end the ranks that are still there."""
        self._has_left = True
        if self._coordinator.claim_first_failure() and self._channel is not None:
            self._channel.fail(FAILED, self._stay)

    def end_the_job(self, code: int) -> None:
        """End the other ranks with `code`. This process ends by itself later."""
        self._end_watch()
        if self._channel is not None:
            self._channel.fail(code, WHOLE_JOB)

    def _end_watch(self) -> None:
        self._over.set()
        self._stop.wakes.put(None)

    def fail(self, ending: Ending) -> None:
        """This rank has failed: say so, and end the others.

        The first rank to fail says it. Without a traceback to print, the others wait to be ended.
        """
        if self._coordinator.claim_first_failure():
            self._print_once(ending)
        elif ending.is_verdict or ending.is_refusal:
            self._wait_for_end()
        self.end_the_job(ending.code)

    def _excepthook(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        """Print the script's own traceback, then one line that names the rank that failed first.

        The other ranks' errors about broken connections follow from it and would only hide it. An error
        that is a sentence needs no traceback. A launcher gets it from the previous hook.
        """
        if os.getpid() != self._pid:  # a forked child, which is no rank
            self._previous_excepthook(kind, error, traceback)
            return
        ending = ending_of(error)
        if not ending.traceback and not self._has_launcher:
            self.fail(ending)
            return
        is_first = self._coordinator.claim_first_failure()
        if not is_first and isinstance(error, (RuntimeError, ChannelLost)):
            self._wait_for_end()
        self._previous_excepthook(kind, error, traceback)
        if is_first:
            self._print_once(ending)
        self.end_the_job(FAILED)

    def _print_once(self, ending: Ending) -> None:
        """Print the line of an ending. The hook and the end of the script may both have the error.

        A launcher prints every line except that of bad input.
        """
        world = self._coordinator.world
        line = ending.line(f"rank {world.rank} on {world.hostname}")
        if line and not self._has_printed and (ending.is_refusal or not self._has_launcher):
            self._has_printed = True
            print_error(line)

    def _wait_for_end(self) -> None:
        if self._thread.is_alive():
            self._thread.join(2 * _GRACE_S)

    def _watch(self) -> None:
        unblock_sigusr1()
        if self._channel is None or self._coordinator.world.world_size == 1:
            self._over.wait()
            return
        self._stop.is_alone = False
        while self._wait_for_failure(self._channel):
            if self._over.wait(_GRACE_S):
                return
            # Meanwhile this rank may have left its stay with an error of its own.
            if code := self._code_of_failure(self._channel):
                self._end_next_stay(self._channel, code)
                with contextlib.suppress(Exception):  # a script may replace stdout by anything
                    sys.stdout.flush()
                self._exit_now(code)
                return

    def _wait_for_failure(self, channel: JobChannel) -> bool:
        """Wait for a failure of any rank, and agree on the step of a stop. False if this rank is over."""
        while not self._over.is_set():
            if self._code_of_failure(channel):
                return True
            self._stop.agree(channel)
            self._stop.wakes.get()
        return False

    def _code_of_failure(self, channel: JobChannel) -> int:
        """The exit code of the rank whose failure ends this one, 0 if there is none."""
        if code := channel.code_of_failure(WHOLE_JOB):
            return code
        if not self._has_left and (code := channel.code_of_failure(self._stay)):
            return code
        if channel.is_lost and not channel.was_closed_here:
            return self._code_of_lost_job()
        return 0

    def _end_next_stay(self, channel: JobChannel, code: int) -> None:
        """A rank that has left this stay with an error, and caught it, cannot go on without this rank."""
        if channel.is_lost or channel.code_of_failure(WHOLE_JOB):
            return
        if not self._coordinator.claim_first_failure():
            channel.fail(code, self._stay + 1)
            return
        # Nobody has failed in this stay, so it ends because of the one before.
        world = self._coordinator.world
        sentence = (
            f"rank {world.rank} on {world.hostname} caught an error and went on, but other ranks were still "
            "in the process group of that error, and have ended. All ranks have to leave it."
        )
        self._print_once(Ending(code, sentence, is_verdict=True))

    def _code_of_lost_job(self) -> int:
        """Rank 0 has ended without a word, or the process that serves the channel has."""
        world = self._coordinator.world
        if world.local_rank == 0:
            rank = f"rank {world.rank} on {world.hostname}"
            lost = f"{rank} lost the connection to rank 0; exiting"
            self._print_once(Ending(FAILED, lost, is_verdict=True))
        return FAILED
