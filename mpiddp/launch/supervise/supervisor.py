"""Supervise one mpirun: receive the ranks' messages, forward stop requests, end hanging processes.

One loop waits for sockets, signals and timers. It costs nothing while nothing happens.
"""

from __future__ import annotations

import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mpiddp.launch import log
from mpiddp.launch.supervise.control_server import ControlServer, Message
from mpiddp.launch.supervise.job_state import JobState
from mpiddp.launch.supervise.mpirun_process import ORPHANS_S, MpirunProcess
from mpiddp.launch.supervise.signals import STOP_SIGNALS, child_exits_on_socket

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
    start_timeout_s: float | None = None  # until the first rank has started
    stop_after_s: float | None = None
    hang_timeout_s: float | None = None


@dataclass(frozen=True)
class MpirunEnd:
    """How mpirun ended: its code (-N if signal N killed it), and whether a stop was requested.

    `was_killed`: by a signal that this launcher did not send. `failed_stopping`: a rank failed after the
    stop request and before it was forced to end.
    """

    code: int
    interrupted: bool
    was_killed: bool = False
    failed_stopping: bool = False


class Supervisor:
    """One job. `server` is None if the ranks cannot reach this process; mpirun's exit code counts then."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        server: ControlServer | None,
        state: JobState,
        limits: Limits,
    ) -> None:
        self._selector = selector
        self._server = server
        self._state = state
        self._limits = limits
        self._agenda: list[tuple[float, Callable[[], None]]] = []  # sorted by time
        self._stops = 0
        self._is_failing = False
        self._failed_stopping = False
        self._is_ending = False
        self.verdict = ""  # the reason, if the supervisor ended the job

    def run(self, argv: Sequence[str], env: Mapping[str, str], signals: socket.socket) -> MpirunEnd:
        """Run mpirun until it and all its ranks have ended.

        The first of the `signals` (see `mpiddp.launch.supervise.signals.signals_on_socket`) requests a
        stop of the ranks. The second kills all processes of the job on this host, and its daemons on other
        hosts then end too.
        """
        with child_exits_on_socket():
            self._selector.register(signals, selectors.EVENT_READ, signals)
            self._mpirun = MpirunProcess(argv, env)
            if self._limits.stop_after_s is not None:
                self._in(self._limits.stop_after_s, self._stop_by_the_clock)
            if self._limits.start_timeout_s is not None and self._server is not None:
                self._in(self._limits.start_timeout_s, self._check_start)
            if self._limits.hang_timeout_s is not None:
                self._in(1.0, self._check_for_hangs)
            while self._mpirun.code is None:
                self._wait(signals)
            self._receive_last_messages(signals)
            self._selector.unregister(signals)
            if left := self._mpirun.end_orphans(0.0 if self._stops > 1 else ORPHANS_S):
                processes = ", ".join(map(str, left))
                log.info(f"processes {processes} cannot be killed: they are blocked in the kernel.")
        code = self._mpirun.code
        assert code is not None
        was_killed = code < 0 and not self._is_ending
        return MpirunEnd(code, self._stops > 0, was_killed, self._failed_stopping)

    def _in(self, seconds: float, action: Callable[[], None]) -> None:
        self._agenda.append((time.monotonic() + seconds, action))
        self._agenda.sort(key=lambda entry: entry[0])

    def _wait(self, signals: socket.socket, at_most_s: float | None = None) -> None:
        """Wait for sockets, signals and timers, at most `at_most_s`, and handle those that are ready."""
        timeout = at_most_s
        if self._agenda:
            until = min(max(0.0, self._agenda[0][0] - time.monotonic()), LONGEST_WAIT_S)
            timeout = until if timeout is None else min(until, timeout)
        ready = [key.data for key, _ in self._selector.select(timeout)]
        for data in ready:
            if data is not signals and self._server is not None:
                for message in self._server.receive(data):
                    self._on_message(message)
        if signals in ready:  # after the messages, which the signal's sender may have reacted to
            for number in signals.recv(64):
                if number in STOP_SIGNALS:
                    self._on_signal(number)
                elif number == signal.SIGCHLD:
                    self._mpirun.reap_adopted()
        while self._agenda and self._agenda[0][0] <= time.monotonic():
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
        self._state.note(message)
        if message.kind == "started" and self._stops and self._server is not None:
            self._server.send(message.rank, "stop")
        if message.kind == "joining" and len(self._state.joining) == 1:
            timeout_s = message.facts["timeout_s"]
            self._in(timeout_s, lambda: self._check_for_missing_ranks(timeout_s))
        if message.rank in self._state.failures and not self._is_failing:
            self._is_failing = True
            self._failed_stopping = self._stops == 1 and not self._is_ending
            # By then most starters have ended the other ranks, and the ranks' own failure watch has
            # under every starter. Only this process notices a host that stopped answering.
            spread_s = 0.0 if message.facts.get("silent") else SPREAD_S
            self._in(spread_s, lambda: self._send_all("end", code=1))
            self._in(spread_s + 1.0, self._stop_mpirun)
        if self._server is not None and not self._server.connected and self._state.done:
            self._in(EXIT_S, self._stop_mpirun)

    def _send_all(self, kind: str, **facts: object) -> None:
        if self._server is not None:
            self._server.send_all(kind, **facts)

    def _request_stop(self, reason: str) -> None:
        self._stops = max(self._stops, 1)
        if self._server is None or not self._server.connected:
            self._stop_mpirun()
            return
        self._send_all("stop")
        self._in(self._limits.grace_s, self._stop_mpirun)
        if self._state.supports_stop:
            log.info(
                f"{reason}: the ranks are saving and stopping; another signal kills them at once."
            )

    def _stop_by_the_clock(self) -> None:
        if not self._stops:
            self._request_stop("--stop-after")

    def _stop_mpirun(self) -> None:
        if not self._is_ending:
            self._is_ending = True
            self._mpirun.stop()
            # A rank that hangs in a collective does not react, nor does an mpirun whose link is cut.
            self._in(STOP_S, self._mpirun.kill_all)

    def _receive_last_messages(self, signals: socket.socket) -> None:
        """Receive the messages that are still in transit, and drop the hosts that do not acknowledge."""
        if self._server is None:
            return
        deadline = time.monotonic() + SILENCE_S
        self._send_all("end", code=1)
        while self._server.connected and time.monotonic() < deadline:
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
        if newest is None or time.monotonic() - newest < timeout_s:
            self._in(min(1.0, timeout_s), self._check_for_hangs)
            return
        self._request_stacks(lambda: self._report_hang(newest))

    def _request_stacks(self, then: Callable[[], None]) -> None:
        self._state.stacks.clear()
        self._state.frames.clear()
        self._send_all("stacks")
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
            log.info(sentence)
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
        self._send_all("end", code=1)
        self._in(END_S, self._stop_mpirun)
