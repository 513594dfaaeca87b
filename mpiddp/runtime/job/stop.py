"""All ranks stop after the same step, and exchange messages only after a request to stop.

After a request, the thread of each rank's channel proposes a step slightly ahead, in a gather to which the
first calls the others. The rank does not pass that step before the decision. All ranks stop at the highest
proposed step, which no rank has passed.

    while not mpiddp.should_stop():
        train_one_step()
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from contextlib import suppress
from functools import partial
from typing import Any

from mpiddp.runtime.job.coordinator import Coordinator

BY_OPTIMIZER, BY_CALLS, BY_SCRIPT = range(3)  # who counts the steps; the last one is right
_AHEAD = 2  # steps; no rank waits if they take longer than the agreement
_CHILDREN_S = 5.0  # for a child that handles SIGTERM itself


class StopRequest:
    """The state of a requested stop in this process. Its steps are the calls of `should_stop`.

    Args:
        session: the Session of this process, whose module imports this one.
    """

    def __init__(self, session: Any) -> None:
        self._session = session
        self._lock = threading.RLock()  # a handler of a signal may call os._exit
        self._calls = 0
        self._denied = 0  # the latest call at which the ranks do not stop
        self._steps_before = 0  # steps of the run before this process resumed it
        self._key = "stop"  # of the gather of the proposals
        self._proposed: int | None = None
        self._step: int | None = None
        self._decided = threading.Event()
        self.has_stopped = False  # this script ends early, as requested
        # A plain flag: a signal handler that waits for a lock could wait for its own thread.
        self.is_requested = False
        self.supports_stop = False  # whether the script calls `should_stop`

    @property
    def _is_alone(self) -> bool:
        """Whether there is no other rank to agree with."""
        channel = self._session.channel
        return channel is None or channel.world.world_size == 1

    def enter_group(self) -> None:
        """The ranks meet again. What they proposed when they left the last group counts no longer."""
        with self._lock:
            if self._proposed is not None and self._step is None:
                self._key, self._proposed = f"{self._key}+", None

    def declare_support(self) -> None:
        """Declare that this script calls `should_stop`, so that an earlier request waits for the call."""
        if not self.supports_stop:
            self.supports_stop = True
            self._session.send("supports_stop")
            if self._session.has_launcher:
                stop_on(self, signal.SIGTERM)

    def count_from(self, step: int) -> None:
        """The run made `step` steps before this process. The launcher receives the sum."""
        self._steps_before = step

    def request(self) -> None:
        """Request a stop of this process. A script that never calls `should_stop` gets SIGTERM instead."""
        if self.supports_stop:
            self.note_request()
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    def note_request(self) -> None:
        """Stop this script at its next agreed step. A signal handler may call this."""
        self.is_requested = True
        if self._session.channel is not None:
            self._session.channel.wake()

    def should_stop(self) -> bool:
        """See `mpiddp.should_stop`."""
        self.declare_support()
        with self._lock:
            self._calls += 1
        self._session.count(self._steps_before + self._calls, BY_CALLS)
        stops = self._stops_at(self._calls)
        if stops:
            self.stopped()
        return stops

    def stops_next(self) -> bool:
        """Whether the next call of `should_stop` returns True, on all ranks after the same step.

        So a script can save before that call. If it never calls `should_stop`, the answer is False.
        """
        if self.has_stopped or not self.supports_stop:
            return self.has_stopped
        return self._stops_at(self._calls + 1)

    def _stops_at(self, call: int) -> bool:
        """Whether all ranks stop at this call, or before. Waits for the decision if that may be so."""
        with self._lock:
            if self._is_alone and self.is_requested and self._step is None:
                self._decide(max(call, self._denied + 1))
            must_wait = self._step is None and self._proposed == call
        if must_wait:
            self._decided.wait()
        # A later proposal of this rank is a later step, and the decision is later, too.
        stops = self._step is not None and call >= self._step
        if not stops:
            self._denied = call
        return stops

    def stopped(self) -> None:
        """Record that this rank ends early with its work saved, on request or for another reason."""
        if not self.has_stopped:
            self.has_stopped = True
            self._session.send("stopped")
            self._session.tell_agent("stopped")

    def agree(self, channel: Coordinator) -> None:
        """Advance the agreement, without waiting. The channel's thread calls this after all news."""
        is_called = self.is_requested or channel.is_called(self._key)
        if self._is_alone or self._step is not None or not is_called:
            return
        self.is_requested = True
        self.propose_step(channel, _AHEAD)
        steps = channel.given(self._key)
        if steps is not None:
            with self._lock:
                self._decide(max(steps))

    def propose_step(self, channel: Coordinator, ahead: int) -> None:
        """Propose the step `ahead` of the present one, once, and do not pass it before the decision.

        A rank that leaves proposes its present step, with `ahead` 0.
        """
        with self._lock:
            if self._proposed is not None:
                return
            self._proposed = self._calls + ahead
        channel.give(self._key, self._proposed, calls=self.is_requested)

    def _decide(self, step: int) -> None:
        self._step = step
        self._decided.set()


def stop_on(stop: StopRequest, *numbers: signal.Signals, only_first: bool = False) -> None:
    """Treat these signals as requests to stop, unless the script, or nohup, handles them itself.

    SIGUSR1 comes from mpirun or srun. Batch systems send SIGTERM, and the launcher, which gets it too, limits
    the time. Without a launcher, `only_first` lets a second signal kill.
    """
    if threading.main_thread() is not threading.current_thread():
        return
    for number in numbers:
        before = signal.getsignal(number)
        if before in (signal.SIG_DFL, signal.default_int_handler):
            handler = partial(_on_signal, stop, before if only_first else None)
            signal.signal(number, handler)
            if not only_first:
                os.register_at_fork(after_in_child=partial(_restore, number, handler))


def _on_signal(stop: StopRequest, before: Any, number: int, frame: Any) -> None:
    stop.note_request()
    if before is not None:
        signal.signal(number, before)
        name = signal.Signals(number).name
        line = f"mpiddp: {name}: saving and stopping; another signal kills the training at once.\n"
        with suppress(OSError):  # the Ctrl-C may have ended the reader of a pipe as well
            os.write(2, line.encode())


def _restore(number: signal.Signals, handler: object) -> None:
    """A forked child is no rank."""
    if signal.getsignal(number) is handler:
        signal.signal(number, signal.SIG_IGN if number == signal.SIGUSR1 else signal.SIG_DFL)


def leave_sigterm_to_rank() -> None:
    """From now on, processes that multiprocessing forks from this rank leave a stranger's SIGTERM to it.

    A batch system may send one to every process of a job, whose rank still saves, and needs its workers. Once
    the rank has ended, they obey its agent. Processes of os.fork or subprocess are not affected: the program
    that they may execute would inherit the blocked signal.
    """
    from multiprocessing import util  # its handler of atexit comes after those registered later

    util.register_after_fork(_obey_parent, _obey_parent)
    atexit.register(_end_children)


def _end_children() -> None:
    """End the daemons of this process, by SIGKILL after some time.

    multiprocessing sends SIGTERM once and then waits for ever, and the kernel drops it where a stranger's has
    just arrived.
    """
    import multiprocessing

    daemons = [child for child in multiprocessing.active_children() if child.daemon]
    for child in daemons:
        child.terminate()
    for child in daemons:
        child.join(_CHILDREN_S)
        child.kill()


def _obey_parent(_: object) -> None:
    """In a forked child: ignore a SIGTERM unless the rank sends it, or has ended.

    A handler that the child itself installs gets every SIGTERM.
    """
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # later threads inherit the mask
        threading.Thread(target=_obey, args=(os.getppid(),), daemon=True).start()


def _obey(rank: int) -> None:
    while True:
        sender = signal.sigwaitinfo({signal.SIGTERM}).si_pid
        has_own_handler = signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        if has_own_handler or sender == rank or os.getppid() != rank:
            break
    if not has_own_handler and sender == rank and _is_loader_worker():
        os._exit(0)  # as torch's own handler of SIGTERM does; its rank would report another end
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.kill(os.getpid(), signal.SIGTERM)


def _is_loader_worker() -> bool:
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None
