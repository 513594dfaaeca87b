"""Supervise one mpirun: receive the ranks' messages, forward stop requests, end hanging processes.

One loop waits for sockets, signals and timers. It uses no CPU while idle.
"""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from mpiddp.launch.supervise.awake_clock import AwakeClock
from mpiddp.launch.supervise.control_server import ControlServer, Message
from mpiddp.launch.supervise.exchange import Exchange
from mpiddp.launch.supervise.job_state import JobState
from mpiddp.launch.supervise.last_output import receive_last_output
from mpiddp.launch.supervise.mpirun_process import ORPHANS_S, MpirunProcess
from mpiddp.launch.supervise.output import Outputs, Shown
from mpiddp.launch.supervise.signals import STOP_SIGNALS, SignalQueue, with_child_exits
from mpiddp.protocol import CONFIRM_EVERY, HANDED_OVER

# Time limits for:
STOP_S = 5.0  # mpirun to stop its ranks; Open MPI 4.1 takes up to 4 s
SPREAD_S = 3.0  # a failure to reach all ranks by itself
EXIT_S = 10.0  # mpirun to end once no rank is left
STACKS_S, INTERRUPTED_S = 4.0, 1.0  # ranks to send their stacks, also after an interrupt
END_S = 2.0  # ranks to end after an "end" message
SILENCE_S = 1.0  # a host to acknowledge a message

LONGEST_WAIT_S = 86400.0  # epoll accepts at most a few weeks


@dataclass(frozen=True)
class Limits:
    """The time limits of the user, in seconds; None means no limit."""

    grace_s: float = 30.0
    save_grace_s: float = 600.0  # instead of grace_s, while a rank is saving
    start_timeout_s: float | None = None  # until the first rank has started
    stop_after_s: float | None = None
    hang_timeout_s: float | None = None


@dataclass(frozen=True)
class MpirunEnd:
    """How mpirun ended: its code (-N if signal N killed it), and whether a stop was requested.

    `was_killed`: by a signal that this launcher did not send. `failed_stopping`: a rank failed after the
    stop request and before it was forced to end. `limit`: the time limit of a stop that the ranks exceeded.
    `was_ended`: this launcher has ended mpirun.
    """

    code: int
    interrupted: bool
    was_killed: bool = False
    failed_stopping: bool = False
    limit: str = ""
    was_ended: bool = False


class Supervisor:
    """One job. `server` is None if the ranks cannot reach this process; mpirun's exit code counts then.

    The times of `state` are those of `clock`. `runs_command`: the job is no Python script, and may never
    make a step. `exchange`: of the function that every rank of the job runs.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        server: ControlServer | None,
        state: JobState,
        limits: Limits,
        clock: AwakeClock,
        shown: Shown | None = None,
        *,
        runs_command: bool = False,
        exchange: Exchange | None = None,
    ) -> None:
        self._shown = shown or Shown()
        self._exchange = exchange or Exchange()
        self._selector = selector
        self._server = server
        self._state = state
        self._limits = limits
        self._clock = clock
        self._agenda: list[tuple[float, Callable[[], None]]] = []  # sorted by the clock's time
        self._stop_after_at = float("inf")  # by time.monotonic(): a batch system's clock runs on
        self._stops = 0
        self._is_failing = False
        self._failed_stopping = False
        self._is_ending = False
        self._stopping_since = 0.0
        self._says_saving = False
        self._has_no_steps_since = clock.now() if runs_command else float("inf")
        self._unconfirmed: dict[int, int] = {}  # messages of progress of each rank
        self._limit = ""
        self.verdict = ""  # the reason, if the supervisor ended the job

    def run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        signals: SignalQueue,
        stop_signal: signal.Signals = signal.SIGTERM,
    ) -> MpirunEnd:
        """Run mpirun until it and all its ranks have ended.

        The first of the `signals` requests a stop of the ranks. The second kills all processes of the job
        on this host, and its daemons on other hosts then end too.

        Args:
            stop_signal: the signal that ends mpirun, see `MpirunProcess`.
        """
        with with_child_exits(signals):
            self._selector.register(signals, selectors.EVENT_READ, signals)
            self._outputs = Outputs(
                self._shown, self._state.world_size, has_connections=self._server is not None
            )
            self._mpirun = MpirunProcess(argv, env, self._outputs.copies, stop_signal)
            if self._limits.stop_after_s is not None:
                self._stop_after_at = time.monotonic() + self._limits.stop_after_s
            if self._limits.start_timeout_s is not None and self._server is not None:
                self._in(self._limits.start_timeout_s, self._check_start)
            if self._limits.hang_timeout_s is not None:
                self._in(1.0, self._check_for_hangs)
            while self._mpirun.code is None:
                self._wait(signals)
            self._receive_last_messages(signals)
            if left := self._mpirun.end_orphans(0.0 if self._stops > 1 else ORPHANS_S):
                processes = ", ".join(map(str, left))
                self._log(
                    f"processes {processes} cannot be killed: they are blocked in the kernel."
                )
            self._finish_output(signals)
            self._selector.unregister(signals)
        code = self._mpirun.code
        assert code is not None
        was_killed = code < 0 and not self._is_ending
        return MpirunEnd(
            code,
            self._stops > 0,
            was_killed,
            self._failed_stopping,
            self._limit,
            was_ended=self._is_ending or self._stops > 1,
        )

    def _finish_output(self, signals: SignalQueue) -> None:
        """Copy the rest of the output. A second signal ends the wait for a terminal that is stopped."""
        self._agenda.clear()
        receive_last_output(
            self._outputs,
            self._mpirun,
            self._awaited,
            wait=lambda seconds: self._wait(signals, seconds),
            is_killed=lambda: self._stops > 1,
        )
        self._mpirun.reap_adopted()

    def _awaited(self, ranks: Collection[int]) -> str:
        """Those of the ranks whose output may still come, "" if there are none.

        That of a silent host, and of a rank that does not end, is not waited for.
        """
        silent = self._state.silent_hosts()
        stuck = self._server.connected if self._server is not None else set()
        hosts = self._state.hosts
        return self._state.names([r for r in ranks if r not in stuck and hosts[r] not in silent])

    def _log(self, sentence: str) -> None:
        self._outputs.log(sentence)

    def _in(self, seconds: float, action: Callable[[], None]) -> None:
        self._agenda.append((self._clock.now() + seconds, action))
        self._agenda.sort(key=lambda entry: entry[0])

    def _timeout(self) -> float | None:
        """Seconds until the next timer, None if there is none."""
        until = min(
            self._agenda[0][0] - self._clock.now() if self._agenda else float("inf"),
            self._stop_after_at - time.monotonic(),
        )
        return None if until == float("inf") else min(max(0.0, until), LONGEST_WAIT_S)

    def _wait(self, signals: SignalQueue, at_most_s: float | None = None) -> None:
        """Wait for sockets, signals and timers, at most `at_most_s`, and handle those that are ready."""
        timeout = self._timeout()
        if at_most_s is not None:
            timeout = at_most_s if timeout is None else min(timeout, at_most_s)
        ready = [key.data for key, _ in self._clock.select(self._selector, timeout)]
        for data in ready:
            if data is not signals and self._server is not None:
                for message in self._server.receive(data):
                    self._on_message(message)
        if signals in ready:  # after the messages, which the signal's sender may have reacted to
            for arrival in signals.receive():
                if arrival.number in STOP_SIGNALS:
                    self._on_signal(arrival.number)
                elif arrival.number == signal.SIGCHLD:
                    self._mpirun.reap_adopted()
        if self._stop_after_at <= time.monotonic():
            self._stop_after_at = float("inf")
            self._stop_by_the_clock()
        while self._agenda and self._agenda[0][0] <= self._clock.now():
            self._agenda.pop(0)[1]()

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGHUP and self._stops:
            return  # a closing terminal may send two, from the shell and from the kernel
        self._stops += 1
        if self._stops == 1:
            self._request_stop(signal.Signals(number).name)
        else:
            self._mpirun.kill_all()

    def _on_message(self, message: Message) -> None:
        if message.kind == "output":
            self._outputs.add(rank=message.rank, **message.facts)
            return
        if message.kind in HANDED_OVER:
            self._exchange.add(message)
            return
        self._state.note(message)
        if message.kind == "started" and self._stops and self._server is not None:
            self._server.request_stop(message.rank)
        if message.kind == "progress" and self._server is not None:
            self._confirm(message, self._server)
        if message.kind == "joining" and len(self._state.joining) == 1:
            timeout_s = message.facts["timeout_s"]
            self._in(timeout_s, lambda: self._check_for_missing_ranks(timeout_s))
        if message.rank in self._state.failures and not self._is_failing:
            self._is_failing = True
            self._failed_stopping = self._stops == 1 and not self._is_ending
            # By then most starters have ended the other ranks, and the ranks' own failure watch has
            # under every starter. Only this process notices a host that stopped answering.
            spread_s = 0.0 if message.facts.get("silent") else SPREAD_S
            self._in(spread_s, self._end_ranks)
            self._in(spread_s + 1.0, self._stop_mpirun)
        if self._server is not None and not self._server.has_ranks and self._state.done:
            self._in(EXIT_S, self._stop_mpirun)

    def _confirm(self, message: Message, server: ControlServer) -> None:
        """Tell a rank now and then that its progress is read. Without this, it falls silent."""
        rank = message.rank
        self._unconfirmed[rank] = self._unconfirmed.get(rank, 0) + 1
        if self._unconfirmed[rank] >= CONFIRM_EVERY:
            self._unconfirmed[rank] = 0
            server.confirm(message)

    def _end_ranks(self) -> None:
        if self._server is not None:
            self._server.end_all(code=1)

    def _request_stop(self, reason: str) -> None:
        self._stops = max(self._stops, 1)
        if self._server is None or not self._server.has_ranks:
            self._stop_mpirun()
            return
        for rank in self._server.connected:
            self._server.request_stop(rank)
        self._stopping_since = self._clock.now()
        self._in(self._limits.grace_s, self._check_grace)
        if self._state.supports_stop:
            self._log(
                f"{reason}: the ranks are saving and stopping; another signal kills them at once."
            )

    def _check_grace(self) -> None:
        """End the ranks that have not stopped in time. A rank that saves has longer."""
        if self._is_ending:
            return
        grace_s, save_grace_s = self._limits.grace_s, self._limits.save_grace_s
        since_stop = self._clock.now() - self._stopping_since
        since_save = self._clock.now() - max(self._state.last_saved_at, self._stopping_since)
        saving = sorted(self._state.saving)
        if saving and since_stop < save_grace_s:
            if not self._says_saving:
                self._says_saving = True
                self._log(
                    f"{self._state.names(saving)} {'is' if len(saving) == 1 else 'are'} still saving; "
                    f"waiting for at most {save_grace_s:g} s (--save-grace)."
                )
            self._in(min(1.0, save_grace_s - since_stop), self._check_grace)
        elif not saving and since_save < grace_s:  # after a save, a rank still has to leave
            self._in(grace_s - since_save, self._check_grace)
        else:
            late = saving or [r for r in sorted(self._state.started) if r not in self._state.done]
            self._limit = (
                f"{self._state.names(late)} {'was' if len(late) == 1 else 'were'} still saving "
                f"{save_grace_s:g} s after the request (--save-grace)"
                if saving
                else f"{self._state.names(late)} had not stopped {grace_s:g} s after the request "
                "(--grace)"
            )
            self._stop_mpirun()

    def _stop_by_the_clock(self) -> None:
        if not self._stops:
            self._request_stop("--stop-after")

    def _stop_mpirun(self) -> None:
        if not self._is_ending:
            self._is_ending = True
            self._mpirun.stop()
            # A rank that hangs in a collective does not react, nor does an mpirun whose link is cut.
            self._in(STOP_S, self._mpirun.kill_all)

    def _receive_last_messages(self, signals: SignalQueue) -> None:
        """Receive the messages that are still in transit, and drop the hosts that do not acknowledge."""
        if self._server is None:
            return
        deadline = time.monotonic() + SILENCE_S
        self._server.end_all(code=1)
        while self._server.has_ranks and time.monotonic() < deadline:
            self._wait(signals, deadline - time.monotonic())
        for message in self._server.drop_silent_hosts():
            self._state.note(message)

    def _check_start(self) -> None:
        """End the job if no rank has started: mpirun hangs, and no other limit would end it."""
        if not self._state.started and not self._is_failing and not self._stops:
            self._end(
                f"no rank has started in {self._limits.start_timeout_s:g} s: mpirun or one of its "
                "ssh logins hangs. If a start takes that long, raise --timeout."
            )

    def _check_for_hangs(self) -> None:
        """Without a step for too long, request the stacks of all ranks, then report the stuck ones."""
        timeout_s = self._limits.hang_timeout_s
        assert timeout_s is not None
        newest = self._state.newest_step_at
        if self._is_failing or self._state.all_done or self._stops:
            return
        if newest is None and self._clock.now() - self._has_no_steps_since >= timeout_s:
            self._has_no_steps_since = float("inf")
            self._log(
                f"no rank has made a step in {timeout_s:g} s. --hang-timeout watches a command only if its "
                "script calls mpiddp.should_stop() in every step."
            )
        if newest is None or self._clock.now() - newest < timeout_s:
            self._in(min(1.0, timeout_s), self._check_for_hangs)
            return
        self._request_stacks(lambda: self._report_hang(newest))

    def _request_stacks(self, then: Callable[[], None]) -> None:
        self._state.stacks.clear()
        self._state.frames.clear()
        if self._server is not None:
            self._server.request_stacks()
        self._in(STACKS_S, self._interrupt_silent_ranks)
        self._in(STACKS_S + INTERRUPTED_S, then)

    def _interrupt_silent_ranks(self) -> None:
        if self._server is not None:
            for rank in self._server.connected - self._state.stacks.keys():
                self._server.interrupt(rank)

    def _report_hang(self, newest: float) -> None:
        if self._state.newest_step_at != newest:  # it was only slow
            self._check_for_hangs()
            return
        if self._is_failing or self._state.all_done or self._stops:
            return
        from mpiddp.launch.supervise.hang_report import hang_sentences

        for sentence in hang_sentences(self._state, self._limits.hang_timeout_s or 0.0):
            self._log(sentence)
        self._end("the job hung and was stopped.")

    def _check_for_missing_ranks(self, timeout_s: float) -> None:
        """If some ranks have not joined in time, request all stacks, then report the missing ranks."""
        if self._state.missing and not self._is_failing and not self._stops:
            self._request_stacks(lambda: self._report_missing_ranks(timeout_s))

    def _report_missing_ranks(self, timeout_s: float) -> None:
        if self._state.missing and not self._is_failing and not self._stops:
            from mpiddp.launch.supervise.hang_report import missing_sentence

            self._end(missing_sentence(self._state, timeout_s))

    def _end(self, verdict: str) -> None:
        self.verdict = verdict
        self._is_failing = True
        self._end_ranks()
        self._in(END_S, self._stop_mpirun)
