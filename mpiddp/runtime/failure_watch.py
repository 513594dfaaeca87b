"""When one rank fails, all ranks end, and one line names the rank. This works without a launcher.

Open MPI and srun end the other ranks after a non-zero exit, MPICH only after a signal, and Intel MPI after
neither once MPI is finalized. A rank inside an NCCL collective notices nothing by itself. So a thread
of every rank polls the store.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType

from mpiddp.errors import BAD_INPUT, FAILED, STOPPED, JobFailed, UserError, print_error
from mpiddp.runtime.coordinator import RANK_0_LEFT, Coordinator
from mpiddp.runtime.host_news import HostNews
from mpiddp.runtime.signed_store import NEWS, whole_number
from mpiddp.runtime.stop_request import StopRequest
from mpiddp.runtime.stop_signals import handle_sigusr1, unblock_sigusr1

_FAILED_KEY = "failed"  # in the store; its value is the exit code of the rank that failed first
_CHECK_INTERVAL_S = 0.5
_AGREE_INTERVAL_S = 0.02  # while the ranks agree on the step of a stop
_FULL_EVERY = 10  # checks; a stranger may have deleted the news
_FULL_WITHOUT_ASKING_EVERY = 120  # checks; the rank that asks for this one may be stopped
_GRACE_S = 1.0  # in which a launcher may end this rank first


class FailureWatch:
    """Ends this process when another rank fails, and ends the other ranks when this one fails.

    It also agrees with the other ranks on the step of a requested stop.

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
        self._stop = stop
        self._has_launcher = has_launcher
        self._exit_now = exit_now
        self._over = threading.Event()
        # The thread must not be inside torch when the interpreter ends, so it polls the store instead
        # of waiting there.
        self._values = coordinator.watched_values
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._previous_excepthook = sys.excepthook
        self._has_printed = False  # the sentence of an error

    def start(self) -> None:
        sys.excepthook = self._excepthook
        atexit.register(self.stop)
        handle_sigusr1(self._stop)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        atexit.unregister(self.stop)
        if sys.excepthook == self._excepthook:
            sys.excepthook = self._previous_excepthook
        if self._thread.is_alive():
            self._thread.join()

    def end_the_job(self, code: int) -> None:
        """End the other ranks with `code`. This process ends by itself later."""
        self._over.set()
        with contextlib.suppress(RuntimeError):  # the store ended with rank 0: all ranks know
            self._coordinator.values.set(_FAILED_KEY, str(code))
            self._coordinator.values.set(NEWS, "")

    def exits(self, code: int, reason: str = "") -> None:
        """The script exits with a code other than 0: end the job with that code.

        A rank that refused its input has printed why, and one that stops on request has not failed.
        """
        if self._coordinator.claim_first_failure() and code not in (BAD_INPUT, STOPPED):
            self._print_ending(f"ended with exit code {code}{f': {reason}' if reason else ''}")
        self.end_the_job(code)

    def refuse(self, error: UserError) -> None:
        """Bad input that is found while the job runs: print its sentence, and end all ranks with code 2."""
        if self._coordinator.claim_first_failure():
            self._print_once(error)
        else:
            self._wait_for_end()
        self.end_the_job(BAD_INPUT)

    def fail(self, error: JobFailed) -> None:
        """A machine, the network or another rank has failed: print its sentence, and end all ranks."""
        if not self._coordinator.claim_first_failure():
            self._wait_for_end()
        elif not self._has_launcher:
            self._print_once(error)
        self.end_the_job(FAILED)

    def _excepthook(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        """Print the script's own traceback, then one line that names the rank that failed first.

        The other ranks' errors about broken connections follow from it and would only hide it. An error
        that is a sentence needs no traceback. A launcher gets it from the previous hook.
        """
        if isinstance(error, UserError) and not self._has_launcher:
            self.refuse(error)
            return
        if isinstance(error, JobFailed) and not self._has_launcher:
            self.fail(error)
            return
        is_first = self._coordinator.claim_first_failure()
        if not is_first and isinstance(error, RuntimeError):
            self._wait_for_end()
        self._previous_excepthook(kind, error, traceback)
        if is_first:
            self._print_ending(f"failed: {kind.__name__}{f': {error}' if str(error) else ''}")
        self.end_the_job(FAILED)

    def _print_once(self, error: Exception) -> None:
        """Print the sentence. The hook and the end of the script may both have the error."""
        if not self._has_printed:
            self._has_printed = True
            print_error(error)

    def _print_ending(self, ending: str) -> None:
        if self._has_launcher:
            return
        world = self._coordinator.world
        print(f"rank {world.rank} on {world.hostname} {ending}", file=sys.stderr, flush=True)

    def _wait_for_end(self) -> None:
        if self._thread.is_alive():
            self._thread.join(_CHECK_INTERVAL_S + 2 * _GRACE_S)

    def _watch(self) -> None:
        unblock_sigusr1()
        if self._coordinator.world.world_size == 1:
            self._over.wait()
            return
        self._stop.is_alone = False
        code = self._code_of_job()
        if code and not self._over.wait(_GRACE_S):
            with contextlib.suppress(Exception):  # a script may replace stdout by anything
                sys.stdout.flush()
            self._exit_now(code)

    def _code_of_job(self) -> int:
        """Wait for a failure of any rank; agree on the step of a stop meanwhile.

        Returns:
            The exit code of the rank that failed first, 0 if this rank is over or rank 0 has left.
        """
        world = self._coordinator.world
        polls = 0
        try:
            news = HostNews(self._values, world)
            with contextlib.closing(news):
                while not self._over.wait(self._interval_s()):
                    polls += 1
                    full_every = _FULL_EVERY if news.asks else _FULL_WITHOUT_ASKING_EVERY
                    is_full = self._stop.is_requested or polls % full_every == 0
                    if not (is_full or news.may_be_there()):
                        continue
                    code = whole_number(self._values.get(_FAILED_KEY), 1, 255) or 0
                    if code or self._values.get(RANK_0_LEFT) is not None:
                        return code  # 0 for a normal end, after rank 0 waited long for this rank
                    self._stop.agree(self._values, world.rank, world.world_size)
                    if self._stop.is_requested:
                        news.close()
        except RuntimeError:  # rank 0 has ended, and its store with it
            if world.local_rank == 0:
                self._print_ending("lost the connection to rank 0's store; exiting")
            return FAILED
        return 0

    def _interval_s(self) -> float:
        return _AGREE_INTERVAL_S if self._stop.is_undecided else _CHECK_INTERVAL_S
