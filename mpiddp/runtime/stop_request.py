"""A stop that all ranks make after the same step, without a message between them in all the others.

When somebody asks, each rank's failure watch proposes a step a little ahead, which its rank does not
pass before the decision. All stop at the furthest of these steps: no rank is beyond it.

    while not mpiddp.should_stop():
        train_one_step()
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from mpiddp.errors import STOPPED

if TYPE_CHECKING:
    from torch.distributed import Store

# Keys of the coordinator's store.
REQUESTED, PROPOSAL, STEP = "stop/requested", "stop/proposal", "stop/step"
AHEAD = 2  # steps, so that a rank need not wait where they take longer than the agreement does


class StopRequest:
    """What this process knows of a stop: its steps are its calls of `should_stop`.

    Args:
        send: tells the launcher a message, if there is a launcher.
        progress: tells it of a step.
    """

    def __init__(self, *, send: Callable[[str], None], progress: Callable[[int], None]) -> None:
        self._send = send
        self._progress = progress
        self._lock = threading.Lock()
        self._calls = 0
        self._steps_before = 0  # of the run, when this process resumed it
        self._proposed: int | None = None
        self._step: int | None = None
        self._decided = threading.Event()
        self.has_stopped = False  # this script ends early, as it was asked to
        # A plain flag: a signal's handler that waited for a lock could wait for itself.
        self.is_requested = False
        self.supports_stop = False  # whether the script will ask
        self.is_alone = True  # until a failure watch looks after it

    def declare_support(self) -> None:
        """This script will call `should_stop`: a request that comes earlier can wait for that."""
        if not self.supports_stop:
            self.supports_stop = True
            self._send("supports_stop")

    def count_from(self, step: int) -> None:
        """The run has made `step` steps before this process: the launcher is told the sum."""
        self._steps_before = step

    def request(self) -> None:
        """Ask this process to stop. A script that never calls `should_stop` gets SIGTERM instead."""
        if self.supports_stop:
            self.is_requested = True
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    @property
    def is_undecided(self) -> bool:
        """Whether somebody asked and the step is still to be agreed on."""
        return self.is_requested and self._step is None

    def should_stop(self) -> bool:
        """See `mpiddp.should_stop`."""
        self.declare_support()
        with self._lock:
            self._calls += 1
            if self.is_alone and self.is_undecided:
                self._decide(self._calls)
            must_wait = self._step is None and self._proposed == self._calls
        self._progress(self._steps_before + self._calls)
        if must_wait:
            self._decided.wait()
        stops = self._step is not None and self._calls >= self._step
        if stops:
            self.stopped()
        return stops

    def stopped(self) -> None:
        """This rank ends early with all that it had, on request or for another reason."""
        if not self.has_stopped:
            self.has_stopped = True
            self._send("stopped")

    def is_requested_end(self, code: object) -> bool:
        """Whether an exit with this code is the early end that somebody asked for."""
        return code == STOPPED and self.has_stopped

    def agree(self, store: Store, rank: int, world_size: int) -> None:
        """Take the next step of the agreement. The failure watch calls this now and then."""
        if self._step is not None:
            return
        if self.is_requested:
            store.set(REQUESTED, "")
        elif not store.check([REQUESTED]):
            return
        self.is_requested = True
        self.propose_step(store, rank, AHEAD)
        keys = [f"{PROPOSAL}/{other}" for other in range(world_size)]
        if rank == 0 and store.check(keys):
            store.set(STEP, str(max(int(store.get(key)) for key in keys)))
        if store.check([STEP]):
            with self._lock:
                self._decide(int(store.get(STEP)))

    def propose_step(self, store: Store, rank: int, ahead: int) -> None:
        """Do not pass the step `ahead` of this one before the decision. A rank that leaves says 0."""
        with self._lock:
            if self._proposed is None:
                self._proposed = self._calls + ahead
        store.set(f"{PROPOSAL}/{rank}", str(self._proposed))

    def _decide(self, step: int) -> None:
        self._step = step
        self._decided.set()
