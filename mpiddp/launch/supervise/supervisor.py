"""Watches over one mpirun: receives from its ranks, ends what does not end by itself, passes stops on.

One loop over sockets, signals and times; it costs nothing while nothing happens.
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

STOP_S = 5.0  # for mpirun to stop its ranks, which Open MPI 4.1 takes up to 4 s for
SPREAD_S = 3.0  # for a failure to reach all ranks by itself
FAREWELL_S = 10.0  # for mpirun to end when no rank is left
STACKS_S, INTERRUPTED_S = 4.0, 1.0  # for ranks to answer, and for those that need an interrupt
END_S = 2.0  # for ranks that were told to end
SILENCE_S = 1.0  # for a host to acknowledge a message
LONGEST_WAIT_S = 86400.0  # epoll takes no more than some weeks


@dataclass(frozen=True)
class Limits:
    """How long this or that may take, in seconds; None: for ever."""

    grace_s: float = 30.0
    start_timeout_s: float | None = None  # until the first rank is there
    stop_after_s: float | None = None
    hang_timeout_s: float | None = None


@dataclass(frozen=True)
class MpirunEnd:
    """How mpirun ended: its code (-N when signal N killed it), and whether we were told to stop.

    `was_killed`: by a signal that was not ours. `failed_stopping`: a rank failed after it was asked to
    stop, before it was made to.
    """

    code: int
    interrupted: bool
    was_killed: bool = False
    failed_stopping: bool = False


class Supervisor:
    """One job. `server` is None where the ranks cannot reach this process: then mpirun's exit code counts."""

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
        self._agenda: list[tuple[float, Callable[[], None]]] = []  # the next one first
        self._stops = 0
        self._is_failing = False
        self._failed_stopping = False
        self._is_ending = False
        self.verdict = ""  # why the job was ended from here, if it was

    def run(self, argv: Sequence[str], env: Mapping[str, str], signals: socket.socket) -> MpirunEnd:
        """Run mpirun until it and all its ranks have ended.

        The first of the `signals` (see `mpiddp.launch.supervise.signals.signals_on_socket`) asks the ranks to
        stop; the second kills all that the job has on this host, whereupon its daemons on other hosts
        end too.
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
        """Do what there is to do, then or as soon as there is something."""
        timeout = at_most_s
        if self._agenda:
            until = min(max(0.0, self._agenda[0][0] - time.monotonic()), LONGEST_WAIT_S)
            timeout = until if timeout is None else min(until, timeout)
        ready = [key.data for key, _ in self._selector.select(timeout)]
        for data in ready:
            if data is not signals and self._server is not None:
                for message in self._server.receive(data):
                    self._on_message(message)
        if signals in ready:  # after the messages: who sends one may have seen what the ranks said
            for number in signals.recv(64):
                if number in STOP_SIGNALS:
                    self._on_signal(number)
                elif number == signal.SIGCHLD:
                    self._mpirun.reap_adopted()
        while self._agenda and self._agenda[0][0] <= time.monotonic():
            self._agenda.pop(0)[1]()

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGHUP and self._stops:
            return  # a terminal that goes may be told of twice, by the shell and by the kernel
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
            # Most launchers end the other ranks by then, and the ranks' own watch does under all;
            # but nobody else notices that a host has fallen silent.
            spread_s = 0.0 if message.facts.get("silent") else SPREAD_S
            self._in(spread_s, lambda: self._send_all("end", code=1))
            self._in(spread_s + 1.0, self._stop_mpirun)
        if self._server is not None and not self._server.connected and self._state.done:
            self._in(FAREWELL_S, self._stop_mpirun)

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
            # A rank that hangs in a collective hears nothing, nor does an mpirun whose link is cut.
            self._in(STOP_S, self._mpirun.kill_all)

    def _receive_last_messages(self, signals: socket.socket) -> None:
        """What the ranks said last may still be on its way, and a host that was cut off says no more."""
        if self._server is None:
            return
        deadline = time.monotonic() + SILENCE_S
        self._send_all("end", code=1)
        while self._server.connected and time.monotonic() < deadline:
            self._wait(signals, deadline - time.monotonic())
        for message in self._server.drop_silent_hosts():
            self._state.note(message)

    def _check_start(self) -> None:
        """No rank at all has come: then it is mpirun that hangs, and nobody else would ever say so."""
        if not self._state.started and not self._is_failing and not self._stops:
            self._end(
                f"no rank has started in {self._limits.start_timeout_s:g} s: mpirun or one of its "
                "ssh logins hangs. If a start takes that long, raise --timeout."
            )

    def _check_for_hangs(self) -> None:
        """Without a step for too long, all ranks are asked for their stacks, then one is blamed."""
        timeout_s = self._limits.hang_timeout_s
        assert timeout_s is not None
        newest = self._state.newest_step_at
        if self._is_failing or self._state.all_done or self._stops:
            return
        if newest is None or time.monotonic() - newest < timeout_s:
            self._in(min(1.0, timeout_s), self._check_for_hangs)
            return
        self._ask_for_stacks(lambda: self._report_hang(newest))

    def _ask_for_stacks(self, then: Callable[[], None]) -> None:
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
        if self._state.newest_step_at != newest:  # so it was only slow
            self._check_for_hangs()
            return
        if self._is_failing or self._state.all_done or self._stops:
            return
        from mpiddp.launch.supervise.hang_report import hang_sentences

        for sentence in hang_sentences(self._state, self._limits.hang_timeout_s or 0.0):
            log.info(sentence)
        self._end("the job hung and was stopped.")

    def _check_for_missing_ranks(self, timeout_s: float) -> None:
        """Some ranks wait for others that have not come: these are asked for their stacks first."""
        if self._state.missing and not self._is_failing and not self._stops:
            self._ask_for_stacks(lambda: self._report_missing_ranks(timeout_s))

    def _report_missing_ranks(self, timeout_s: float) -> None:
        if self._state.missing and not self._is_failing and not self._stops:
            from mpiddp.launch.supervise.hang_report import missing_sentence

            self._end(missing_sentence(self._state, timeout_s))

    def _end(self, verdict: str) -> None:
        self.verdict = verdict
        self._is_failing = True
        self._send_all("end", code=1)
        self._in(END_S, self._stop_mpirun)
