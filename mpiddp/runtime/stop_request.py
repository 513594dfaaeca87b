"""A stop that all ranks make after the same step, without a word between them in all the others.

When somebody asks, each rank's watch promises a step a little ahead, which its rank does not pass
before it has heard more. The furthest promise is where all stop: nobody is beyond it.

    while not mpiddp.should_stop():
        train_one_step()
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from mpiddp.errors import STOPPED
from mpiddp.runtime import control_client

if TYPE_CHECKING:
    from torch.distributed import Store

ASKED, PROMISE, STEP = "stop/asked", "stop/promise", "stop/step"  # keys of the coordinator's store
AHEAD = 2  # steps, so that a rank need not wait where they take longer than the agreement does


class StopRequest:
    """What this process knows of a stop: its steps are its calls of `should_stop`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = 0
        self._steps_before = 0  # of the run, when this process went on with it
        self._promise: int | None = None
        self._step: int | None = None
        self._decided = threading.Event()
        self.has_stopped = False  # this script ends early, as it was asked to
        self.is_asked = False  # a plain one: a handler that waited for a lock could wait for itself
        self.supports_stop = False  # whether the script will ask
        self.is_alone = True  # until a watch looks after it

    def declare_support(self) -> None:
        if not self.supports_stop:
            self.supports_stop = True
            control_client.send("supports_stop")

    def count_from(self, step: int) -> None:
        """The run has made `step` steps before this process: what the launcher says counts them."""
        self._steps_before = step

    @property
    def is_open(self) -> bool:
        """Whether somebody asked and the step is still to be agreed on."""
        return self.is_asked and self._step is None

    def should_stop(self) -> bool:
        self.declare_support()
        with self._lock:
            self._calls += 1
            if self.is_alone and self.is_asked and self._step is None:
                self._decide(self._calls)
            must_wait = self._step is None and self._promise == self._calls
        if control_client.channel is not None:
            control_client.channel.progress(self._steps_before + self._calls)
        if must_wait:
            self._decided.wait()
        stops = self._step is not None and self._calls >= self._step
        if stops:
            self.stopped()
        return stops

    def stopped(self) -> None:
        if not self.has_stopped:
            self.has_stopped = True
            control_client.send("stopped")

    def look(self, store: Store, rank: int, world_size: int) -> None:
        """Take the next step of the agreement; the watch calls this now and then."""
        if self._step is not None:
            return
        if self.is_asked:
            store.set(ASKED, "")
        elif not store.check([ASKED]):
            return
        self.is_asked = True
        self.promise(store, rank, AHEAD)
        keys = [f"{PROMISE}/{other}" for other in range(world_size)]
        if rank == 0 and store.check(keys):
            store.set(STEP, str(max(int(store.get(key)) for key in keys)))
        if store.check([STEP]):
            with self._lock:
                self._decide(int(store.get(STEP)))

    def promise(self, store: Store, rank: int, ahead: int) -> None:
        """Not to go on beyond `ahead` steps from here before the decision; a rank that leaves: 0."""
        with self._lock:
            if self._promise is None:
                self._promise = self._calls + ahead
        store.set(f"{PROMISE}/{rank}", str(self._promise))

    def _decide(self, step: int) -> None:
        self._step = step
        self._decided.set()


_stop = StopRequest()


def is_requested_end(code: object) -> bool:
    """Whether an exit with this code is the early end that somebody asked for."""
    return code == STOPPED and current().has_stopped


def current() -> StopRequest:
    return _stop


def should_stop() -> bool:
    """Whether to save and leave now, because somebody asked the job to stop.

    To be called once in every step, by every rank and at the same point of its loop: all ranks get
    True after the same step, and leave with `sys.exit(75)` or simply at the end of the script. It
    costs microseconds; no rank waits for another one, except in the step or two after a request.
    """
    return _stop.should_stop()


def stopped() -> None:
    """This job ends early with all that it had, for another reason than a request."""
    _stop.stopped()


def declare_support() -> None:
    """This script will call `should_stop`: a request that comes earlier can wait for that."""
    _stop.declare_support()


def ask() -> None:
    """Somebody wants the job to stop. A script that does not ask for it gets SIGTERM instead."""
    if _stop.supports_stop:
        _stop.is_asked = True
    else:
        os.kill(os.getpid(), signal.SIGTERM)


def listen_to_signals() -> None:
    """SIGUSR1, from mpirun or srun, is a request to stop, unless the script has its own handler.

    It is blocked in this thread, and so in the processes that it starts: to a DataLoader's worker it
    would be the end. The watch's thread lets it in.
    """
    main_thread = threading.main_thread() is threading.current_thread()
    if main_thread and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, _on_signal)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])


def listen_when_alone() -> None:
    """Without a launcher that would ask: SIGTERM and Ctrl-C are requests as well, the first time."""
    for number in (signal.SIGTERM, signal.SIGINT):
        before = signal.getsignal(number)
        if before in (signal.SIG_DFL, signal.default_int_handler):  # nohup and the like stay
            signal.signal(number, partial(_on_first_signal, before))


def let_signals_in() -> None:
    with suppress(ValueError):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])


def _on_signal(number: int, frame: Any) -> None:
    _stop.is_asked = True


def _on_first_signal(before: Any, number: int, frame: Any) -> None:
    signal.signal(number, before)
    _stop.is_asked = True
    name = signal.Signals(number).name
    with suppress(OSError):  # a pipe's reader may have got the Ctrl-C as well
        os.write(2, f"mpiddp: {name}: saving; another signal ends it at once.\n".encode())
