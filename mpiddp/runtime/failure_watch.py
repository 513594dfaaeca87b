"""When one rank fails, all end: one line names it, and no launcher has to notice.

Open MPI and srun end the other ranks after a non-zero exit, MPICH only after a signal, Intel MPI after
neither once MPI is finalized; and a rank inside an NCCL collective notices nothing by itself. So
every rank has a thread that looks into the store now and then.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from types import TracebackType

from mpiddp.errors import BAD_INPUT, FAILED, STOPPED, UserError
from mpiddp.runtime.coordinator import RANK_0_LEFT, Coordinator
from mpiddp.runtime.stop_request import StopRequest
from mpiddp.runtime.stop_signals import listen_to_sigusr1, unblock_sigusr1

FAILED_KEY = "failed"  # in the store; its value is the exit code of the rank that failed first
LOOK_EVERY_S = 0.5
AGREE_EVERY_S = 0.02  # where to stop, once somebody asked
GRACE_S = 1.0  # for the launcher to end this rank first, in its own way


class FailureWatch:
    """Ends this process when another rank fails, and the other ranks when this one does.

    It also takes the ranks' part in agreeing on the step of a requested stop.

    Args:
        has_launcher: a launcher names the rank that failed, better and once.
    """

    def __init__(self, coordinator: Coordinator, stop: StopRequest, *, has_launcher: bool) -> None:
        self._coordinator = coordinator
        self._stop = stop
        self._has_launcher = has_launcher
        self._over = threading.Event()
        # The thread must not be inside torch when the interpreter ends, so it looks now and then
        # instead of waiting there.
        self._store = coordinator.second_store
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._show = sys.excepthook

    def start(self) -> None:
        sys.excepthook = self._excepthook
        atexit.register(self.stop)
        listen_to_sigusr1(self._stop)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        atexit.unregister(self.stop)
        if sys.excepthook == self._excepthook:
            sys.excepthook = self._show
        if self._thread.is_alive():
            self._thread.join()

    def end_the_job(self, code: int) -> None:
        """Let the other ranks end with `code`; this process's own end is still to come."""
        self._over.set()
        with contextlib.suppress(RuntimeError):  # the store has gone with rank 0: all know already
            self._coordinator.store.set(FAILED_KEY, str(code))

    def exits(self, code: int) -> None:
        """The script ends this rank with a code other than 0: that is the job's code.

        Who refuses input has said why, and who stops on request has not failed.
        """
        if self._coordinator.claim_first_failure() and code not in (BAD_INPUT, STOPPED):
            self._tell(f"ended with exit code {code}")
        self.end_the_job(code)

    def refuse(self, error: UserError) -> None:
        """Bad input that shows only while the job runs: its sentence, and code 2 for all ranks."""
        if self._coordinator.claim_first_failure():
            print(error, file=sys.stderr, flush=True)
        else:
            self._await_the_end()
        self.end_the_job(BAD_INPUT)

    def _excepthook(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        """The script's own traceback, then one line that names the rank that failed first.

        The broken connections of the others are its consequence, and would only hide it.
        """
        is_first = self._coordinator.claim_first_failure()
        if not is_first and isinstance(error, RuntimeError):
            self._await_the_end()
        self._show(kind, error, traceback)
        if is_first:
            self._tell(f"failed: {kind.__name__}{f': {error}' if str(error) else ''}")
        self.end_the_job(FAILED)

    def _tell(self, what: str) -> None:
        if self._has_launcher:
            return
        world = self._coordinator.world
        print(f"rank {world.rank} on {world.hostname} {what}", file=sys.stderr, flush=True)

    def _await_the_end(self) -> None:
        if self._thread.is_alive():
            self._thread.join(LOOK_EVERY_S + 2 * GRACE_S)

    def _look(self) -> None:
        unblock_sigusr1()
        world = self._coordinator.world
        if world.world_size == 1:
            self._over.wait()
            return
        self._stop.is_alone = False
        code = ""
        while not code:
            if self._over.wait(AGREE_EVERY_S if self._stop.is_undecided else LOOK_EVERY_S):
                break
            try:
                if self._store.check([FAILED_KEY]):
                    code = self._store.get(FAILED_KEY).decode()
                elif self._store.check([RANK_0_LEFT]):  # in good order, after a long wait for us
                    return
                self._stop.agree(self._store, world.rank, world.world_size)
            except RuntimeError:  # rank 0 is gone, and its store with it
                code = "1"
                if self._coordinator.world.local_rank == 0:
                    self._tell("ends: rank 0 is gone, and the store with it")
        if code and not self._over.wait(GRACE_S):
            with contextlib.suppress(Exception):  # whatever the script has put there
                sys.stdout.flush()
            os._exit(int(code))
