"""Supervise one mpirun: receive the ranks' messages, forward stop requests, end hanging processes.

One loop waits for sockets, signals and timers. It uses no CPU while idle.
"""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from mpiddp.errors import JobFailed, UserError
from mpiddp.launch.supervise.agenda import Agenda
from mpiddp.launch.supervise.awake_clock import AwakeClock
from mpiddp.launch.supervise.control_server import ControlServer, Message
from mpiddp.launch.supervise.exchange import Exchange
from mpiddp.launch.supervise.growing import Growing, HostWatch
from mpiddp.launch.supervise.job_state import JobState
from mpiddp.launch.supervise.last_output import receive_last_output
from mpiddp.launch.supervise.limits import Limits
from mpiddp.launch.supervise.mpirun_process import ORPHANS_S, MpirunProcess
from mpiddp.launch.supervise.output import Outputs, Shown
from mpiddp.launch.supervise.signals import STOP_SIGNALS, SignalQueue, with_child_exits
from mpiddp.launch.supervise.stopping import Stopping
from mpiddp.launch.supervise.watchdog import Watchdog
from mpiddp.protocol.messages import CONFIRM_EVERY, HANDED_OVER

# Time limits for:
STOP_S = 5.0  # mpirun to stop its ranks; Open MPI 4.1 takes up to 4 s
SPREAD_S = 3.0  # a failure to reach all ranks by itself
EXIT_S = 10.0  # mpirun to end once no rank is left
END_S = 2.0  # ranks to end after an "end" message
SILENCE_S = 1.0  # a host to acknowledge a message

LONGEST_WAIT_S = 86400.0  # epoll accepts at most a few weeks


@dataclass(frozen=True)
class MpirunEnd:
    """How mpirun ended: its code (-N if signal N killed it), and whether the user requested a stop.

    `was_killed`: by a signal that this launcher did not send. `failed_stopping`: a rank failed after the
    stop request and before it was forced to end. `limit`: the time limit of a stop that the ranks exceeded.
    `was_ended`: this launcher has ended mpirun. `is_at_once`: the user has requested an end without a save.
    `grows`: this launcher has requested a stop, to restart on more hosts.
    """

    code: int
    interrupted: bool
    was_killed: bool = False
    failed_stopping: bool = False
    limit: str = ""
    was_ended: bool = False
    is_at_once: bool = False
    grows: bool = False


class Supervisor:
    """One job. `server` is None if the ranks cannot reach this process; mpirun's exit code counts then.

    The times of `state` are those of `clock`. `watch` looks for hosts, if there is one. `runs_command`: the
    job is no Python script, and may never make a step. `exchange`: of the function that every rank of the
    job runs.
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
        watch: HostWatch | None = None,
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
        self._agenda = Agenda(clock)
        self._stopping = Stopping(
            server,
            state,
            limits,
            self._agenda,
            log=self._log,
            stop_mpirun=self._stop_mpirun,
            end=self._end,
            is_ending=lambda: self._is_ending,
        )
        self._watchdog = Watchdog(
            server,
            state,
            limits,
            self._agenda,
            log=self._log,
            end=self._end,
            is_over=lambda: self._is_failing or self._stopping.is_under_way,
            runs_command=runs_command,
        )
        self._growing: Growing | None = None
        if watch is not None and server is not None and limits.grow_s is not None:
            self._growing = Growing(
                watch,
                limits.grow_s,
                state,
                self._agenda,
                log=self._log,
                stop=self._stopping.request_growth,
                may_stop=self._may_grow,
            )
        self._stop_after_at = float("inf")  # by time.monotonic(): a batch system's clock runs on
        self._is_failing = False
        self._failed_stopping = False
        self._is_ending = False
        self._unconfirmed: dict[int, int] = {}  # messages of progress of each rank
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

        Raises:
            UserError, JobFailed: mpirun cannot be started.
        """
        with with_child_exits(signals):
            self._selector.register(signals, selectors.EVENT_READ, signals)
            self._outputs = Outputs(
                self._shown, self._state.world_size, has_connections=self._server is not None
            )
            try:
                self._mpirun = MpirunProcess(argv, env, self._outputs.copies, stop_signal)
            except (UserError, JobFailed):
                self._outputs.discard()
                raise
            if self._limits.stop_after_s is not None:
                self._stop_after_at = time.monotonic() + self._limits.stop_after_s
            self._watchdog.begin()
            if self._growing is not None:
                self._selector.register(self._growing.watch, selectors.EVENT_READ, self._growing)
            while self._mpirun.code is None:
                self._wait(signals)
            self._end_growing()
            self._receive_last_messages(signals)
            if left := self._mpirun.end_orphans(0.0 if self._stopping.requests > 1 else ORPHANS_S):
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
            self._stopping.requests > 0,
            was_killed,
            self._failed_stopping,
            self._stopping.limit,
            was_ended=self._is_ending or self._stopping.requests > 1,
            is_at_once=self._stopping.requests > 1,
            grows=self._stopping.grows,
        )

    def _finish_output(self, signals: SignalQueue) -> None:
        """Copy the rest of the output. A second signal ends the wait for a terminal that is stopped."""
        self._agenda.clear()
        receive_last_output(
            self._outputs,
            self._mpirun,
            self._awaited,
            wait=lambda seconds: self._wait(signals, seconds),
            is_killed=lambda: self._stopping.requests > 1,
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

    def _timeout(self) -> float | None:
        """Seconds until the next timer, None if there is none."""
        until = min(self._agenda.next_in_s, self._stop_after_at - time.monotonic())
        return None if until == float("inf") else min(max(0.0, until), LONGEST_WAIT_S)

    def _wait(self, signals: SignalQueue, at_most_s: float | None = None) -> None:
        """Wait for sockets, signals and timers, at most `at_most_s`, and handle those that are ready."""
        timeout = self._timeout()
        if at_most_s is not None:
            timeout = at_most_s if timeout is None else min(timeout, at_most_s)
        ready = [key.data for key, _ in self._clock.select(self._selector, timeout)]
        for data in ready:
            if data is self._growing and self._growing is not None:
                if not self._growing.receive():
                    self._end_growing()
            elif data is not signals and self._server is not None:
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
            if not self._stopping.requests:
                self._stopping.request("--stop-after")
        self._agenda.act()

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGHUP and self._stopping.requests:
            return  # a closing terminal may send two, from the shell and from the kernel
        if not self._stopping.requests:
            self._stopping.request(signal.Signals(number).name)
        else:
            self._stopping.requests += 1
            self._mpirun.kill_all()

    def _on_message(self, message: Message) -> None:
        if message.kind == "output":
            self._outputs.add(rank=message.rank, **message.facts)
            return
        if message.kind in HANDED_OVER:
            self._exchange.add(message)
            return
        self._state.note(message)
        self._stopping.on_message(message)
        self._watchdog.on_message(message)
        if self._growing is not None:
            self._growing.on_message()
        if message.kind == "progress" and self._server is not None:
            self._confirm(message, self._server)
        if message.rank in self._state.failures and not self._is_failing:
            self._is_failing = True
            self._failed_stopping = self._stopping.requests == 1 and not self._is_ending
            # By then most starters have ended the other ranks, and the ranks' own failure watch has
            # under every starter. Only this process notices a host that stopped answering.
            spread_s = 0.0 if message.facts.get("silent") else SPREAD_S
            self._agenda.add(spread_s, self._end_ranks)
            self._agenda.add(spread_s + 1.0, self._stop_mpirun)
        if self._server is not None and not self._server.has_ranks and self._state.done:
            self._agenda.add(EXIT_S, self._stop_mpirun)

    def _confirm(self, message: Message, server: ControlServer) -> None:
        """Tell a rank now and then that its progress is read. Without this, it falls silent."""
        rank = message.rank
        self._unconfirmed[rank] = self._unconfirmed.get(rank, 0) + 1
        if self._unconfirmed[rank] >= CONFIRM_EVERY:
            self._unconfirmed[rank] = 0
            server.confirm(message)

    def _may_grow(self) -> bool:
        """Whether this is a moment to stop the ranks for a restart that lasts for a while."""
        is_ending = self._is_failing or self._is_ending or bool(self._state.done)
        lasts_s = self._limits.grow_s or 0.0
        is_last_interval = self._stop_after_at - time.monotonic() < lasts_s
        is_stopping = bool(self._stopping.requests or self._stopping.grows)
        return not (is_ending or is_stopping or is_last_interval)

    def _end_growing(self) -> None:
        if self._growing is not None:
            self._selector.unregister(self._growing.watch)
            self._growing = None

    def _end_ranks(self) -> None:
        if self._server is not None:
            self._server.end_all(code=1)

    def _stop_mpirun(self) -> None:
        if not self._is_ending:
            self._is_ending = True
            self._mpirun.stop()
            # A rank that hangs in a collective does not react, nor does an mpirun whose link is cut.
            self._agenda.add(STOP_S, self._mpirun.kill_all)

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

    def _end(self, verdict: str) -> None:
        self.verdict = verdict
        self._is_failing = True
        self._end_ranks()
        self._agenda.add(END_S, self._stop_mpirun)
