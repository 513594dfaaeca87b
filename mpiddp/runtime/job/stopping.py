"""A requested stop: all ranks stop after the same step, with their work saved.

The ranks exchange messages only after a request. Then each rank proposes a step slightly ahead, in a gather
to which the first calls the others. A rank does not pass its own step before the decision. All ranks stop at
the highest proposed step, which no rank has passed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.job.progress import BY_CALLS, Progress

_AHEAD = 2  # steps; no rank waits if they take longer than the agreement
_NEVER = float("inf")
_ONLY_FIRST = "mpiddp: %s: saving and stopping; another signal kills the training at once.\n"


class StopRequest:
    """The state of a requested stop in this process. Its steps are the calls of `should_stop`."""

    def __init__(
        self, ranks: Coordinator, progress: Progress, tell_agent: Callable[[str], object]
    ) -> None:
        self._ranks, self._progress, self._tell_agent = ranks, progress, tell_agent
        self._changed = threading.Condition()  # its lock: a handler of a signal may call os._exit
        self._calls = 0
        self.steps_before = 0  # steps of the run that another process has made
        self._proposed = 0  # the step that this rank has proposed
        self._step = _NEVER  # after which all ranks stop, once it is decided
        self.has_stopped = False  # this script ends early, as requested
        # A plain flag: a signal handler that waits for a lock could wait for its own thread. The next call of
        # any rank begins the agreement, and calls the others to it.
        self.is_requested = False
        self.supports_stop = False  # whether the script calls `should_stop`
        self.handlers: list[object] = []  # the handlers of signals that `stop_on` has set

    def declare_support(self) -> None:
        """Declare that this script calls `should_stop`, so that an earlier request waits for the call."""
        if not self.supports_stop:
            self.supports_stop = True
            self._ranks.tell_launcher("supports_stop")
            self._tell_agent("supports_stop")
            if self._ranks.has_launcher:
                stop_on(self, signal.SIGTERM)

    def should_stop(self) -> bool:
        self.declare_support()
        with self._changed:
            self._calls += 1
        self._progress.count(self.steps_before + self._calls, BY_CALLS)
        if stops := self._stops_at(self._calls):
            self.stopped()
        return stops

    def stops_next(self) -> bool:
        """Whether the next call of `should_stop` returns True, on all ranks after the same step.

        So a script can save before that call. If it never calls `should_stop`, the answer is False.
        """
        return self.has_stopped or (self.supports_stop and self._stops_at(self._calls + 1))

    def _stops_at(self, call: int) -> bool:
        """Whether all ranks stop at this call, or before. Waits for the decision if that may be so."""
        with self._changed:
            self.agree()
            while self._step == _NEVER and self._proposed == call:
                if self._ranks.is_lost:
                    raise self._ranks.lost()
                self._changed.wait()
            # A later proposal of this rank is a later step, and the decision is later, too.
            return call >= self._step

    def stopped(self) -> None:
        """Record that this rank ends early with its work saved, on request or for another reason."""
        if not self.has_stopped:
            self.has_stopped = True
            self._ranks.tell_launcher("stopped")
            self._tell_agent("stopped")

    def agree(self) -> None:
        """Advance the agreement, without waiting: at each call, and in the thread that receives, after news.

        A rank that has left its process group proposes as well. A rank that is lost gives no step.
        """
        ranks = self._ranks
        with self._changed:
            if not self.is_requested or self._step != _NEVER:
                return
            if not self._proposed:
                self._proposed = self._calls + _AHEAD
                ranks.give("stop", self._proposed)
            steps = [self._proposed] if ranks.world.world_size == 1 else ranks.given("stop")
            if steps is not None:
                self._step = max(step for step in steps if step is not None)
            self._changed.notify_all()


def stop_on(stop: StopRequest, *numbers: signal.Signals, only_first: bool = False) -> None:
    """Treat these signals as requests to stop, unless the script, or nohup, handles them itself.

    SIGUSR1 comes from mpirun or srun, and SIGUSR2 from Grid Engine, to every process of a job. Batch systems
    send SIGTERM, and the launcher, which gets it too, limits the time. Without one, `only_first`: a second one kills.
    """
    defaults = (signal.SIG_DFL, signal.default_int_handler)
    before = {n: handler for n in numbers if (handler := signal.getsignal(n)) in defaults}

    def on_signal(number: int, frame: object) -> None:
        stop.is_requested = True
        if not stop.supports_stop:  # the agent knows whether the launcher has requested it
            stop._tell_agent("unhandled")
        if only_first:
            signal.signal(number, before[signal.Signals(number)])
            # The Ctrl-C may have ended the reader of a pipe as well.
            with contextlib.suppress(OSError):
                os.write(2, (_ONLY_FIRST % signal.Signals(number).name).encode())

    def restore() -> None:
        """A forked child is no rank."""
        for number in before:
            if signal.getsignal(number) is on_signal:
                # Not SIG_IGN, which a program that the child becomes would inherit.
                ignores = number in (signal.SIGUSR1, signal.SIGUSR2)
                signal.signal(number, (lambda *_: None) if ignores else signal.SIG_DFL)

    if before and threading.main_thread() is threading.current_thread():
        stop.handlers.append(on_signal)
        for number in before:
            signal.signal(number, on_signal)
        if not only_first:
            os.register_at_fork(after_in_child=restore)


@contextlib.contextmanager
def interrupts_end(on_interrupt: Callable[[int, None], object]) -> Iterator[None]:
    """Call `on_interrupt` at each SIGINT during the body, and raise KeyboardInterrupt after it."""
    interrupts = list[int]()

    def handler(number: int, frame: object) -> None:
        interrupts.append(number)
        on_interrupt(number, None)

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None):
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupts:
        raise KeyboardInterrupt
