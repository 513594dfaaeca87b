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

from mpiddp.errors import FAILED, print_error
from mpiddp.runtime.job.coordinator import RANK_0_LEFT, Coordinator
from mpiddp.runtime.job.ending import Ending, ending_of
from mpiddp.runtime.job.signed_store import NEWS, whole_number
from mpiddp.runtime.job.stop import StopRequest, handle_sigusr1, unblock_sigusr1

# Keys in the store. Their value is the exit code of the rank that failed first. An error within a stay ends
# the ranks that are in it, and all others unless the script catches it.
_FAILED, _LEFT = "failed", "left with an error"
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
        stay = coordinator.enter()
        stop.enter(stay)
        self._left_key = f"{_LEFT}/{stay}"
        self._has_left = False
        self.rank_0_has_left = False  # and its store with it
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

    def leave(self) -> None:
        """This rank leaves with an error, which its script may catch: end the ranks that are still there."""
        self._has_left = True
        if self._coordinator.claim_first_failure():
            self._publish(self._left_key, FAILED)

    def end_the_job(self, code: int) -> None:
        """End the other ranks with `code`. This process ends by itself later."""
        self._over.set()
        self._publish(_FAILED, code)

    def _publish(self, key: str, code: int) -> None:
        with contextlib.suppress(RuntimeError):  # the store ended with rank 0: all ranks know
            self._coordinator.values.set(key, str(code))
            self._coordinator.values.set(NEWS, "")

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
        ending = ending_of(error)
        if not ending.traceback and not self._has_launcher:
            self.fail(ending)
            return
        is_first = self._coordinator.claim_first_failure()
        if not is_first and isinstance(error, RuntimeError):
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
        from mpiddp.runtime.job.host_news import HostNews  # a single rank needs none of it

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
                    code = self._published_code()
                    self.rank_0_has_left = self._values.get(RANK_0_LEFT) is not None
                    if code or self.rank_0_has_left:
                        return code  # 0 if rank 0 waited long for this rank, or ended early
                    self._stop.agree(self._values, world.rank, world.world_size)
                    if self._stop.is_requested:
                        news.close()
        except RuntimeError:  # rank 0 has ended, and its store with it
            if world.local_rank == 0:
                rank = f"rank {world.rank} on {world.hostname}"
                lost = f"{rank} lost the connection to rank 0's store; exiting"
                self._print_once(Ending(FAILED, lost, is_verdict=True))
            return FAILED
        return 0

    def _published_code(self) -> int:
        """The exit code with which this process has to end, 0 for none."""
        keys = [_FAILED] if self._has_left else [_FAILED, self._left_key]
        codes = (whole_number(self._values.get(key), 1, 255) for key in keys)
        return next((code for code in codes if code), 0)

    def _interval_s(self) -> float:
        return _AGREE_INTERVAL_S if self._stop.is_undecided else _CHECK_INTERVAL_S
