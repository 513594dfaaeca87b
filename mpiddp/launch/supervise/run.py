"""Run one attempt at a job: start its mpirun, wait for events until nothing of it is left, and judge.

The loop waits for sockets, signals and timers, and uses no CPU while idle.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Collection, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from mpiddp.errors import BAD_INPUT, DONE, FAILED, INTERRUPTED, STOPPED
from mpiddp.hosts.names import is_this_host
from mpiddp.launch import log
from mpiddp.launch.monitor.console import Listener
from mpiddp.launch.monitor.ranks import NOTHING_ANNOUNCED, Announcement, Ranks
from mpiddp.launch.starters.command import RankStarter, Request
from mpiddp.launch.streams.input import Input
from mpiddp.launch.streams.output import JobOutput
from mpiddp.launch.streams.tail import Tail
from mpiddp.launch.supervise.attempt import Attempt, Terms
from mpiddp.launch.supervise.control import ControlServer
from mpiddp.launch.supervise.known_cause import look_into
from mpiddp.launch.supervise.mpirun import MpirunProcess, started
from mpiddp.launch.supervise.signals import (
    STOP_SIGNALS,
    AwakeSelector,
    SignalQueue,
    with_child_exits,
)
from mpiddp.launch.supervise.verdict import FirstFailure, History, Stop, verdict
from mpiddp.protocol.messages import HANDED_OVER, INPUT, recorded_error
from mpiddp.protocol.variables import JOB, OUTPUT, SECRET

# Time limits for:
ORPHANS_S = 2.0  # mpirun's orphans to end by themselves
SILENCE_S = 1.0  # a host to acknowledge a message
OUTPUT_S = 5.0  # output that neither continues nor ends
KILLED_S = 0.5  # the last lines of a job that a second signal has killed

LONGEST_WAIT_S = 86400.0  # epoll accepts at most a few weeks


class Outcome(NamedTuple):
    """The launcher's exit code, the sentence that explains it, and how the job resumes.

    Args:
        first: None unless a rank is known to be the first that failed.
        stop: who has requested a stop of the ranks.
        announcement: what the ranks have announced.
        has_started: a rank has reported. made_steps: a rank has made a step.
        known_cause: a sentence to print below `sentence`, see `mpiddp.launch.supervise.known_cause`.
        host_at_fault: the host that has ended the attempt, by its name in the request; "" for none.
        slow_hosts: those that held the others up for long, and their part of the others' speed.
    """

    code: int
    sentence: str = ""
    first: FirstFailure | None = None
    stop: Stop = Stop.NONE
    announcement: Announcement = NOTHING_ANNOUNCED
    has_started: bool = False
    made_steps: bool = False
    known_cause: str = ""
    host_at_fault: str = ""
    slow_hosts: Mapping[str, float] = MappingProxyType({})

    def log(self) -> None:
        """Print the verdict, and the known cause below it."""
        say = log.info if self.code in (DONE, STOPPED) else log.error
        for sentence in (self.sentence, self.known_cause):
            if sentence:
                say(sentence)

    @property
    def resumes(self) -> bool:
        """Whether the same command resumes the job."""
        return self.code == STOPPED or (
            self.code == INTERRUPTED and bool(self.announcement.resume_args)
        )


def run_attempt(
    terms: Terms, starter: RankStarter, request: Request, signals: SignalQueue
) -> Outcome:
    """Run the job to its end, and leave no process of it on any host that can be reached.

    Args:
        signals: the first requests a stop of the ranks. The second kills all processes of the job on this
            host, and its daemons on other hosts then end too.

    Raises:
        UserError: mpirun cannot be started with this request.
        JobFailed: it cannot be started, because a machine failed.
    """
    hosts = request.names_of_ranks
    ranks, job = Ranks(hosts), os.urandom(8).hex()
    with ExitStack() as stack:
        selector = stack.enter_context(AwakeSelector())
        stack.enter_context(terms.console.attending(selector))
        server = ControlServer(_server_address(starter, request), len(hosts), selector)
        stack.enter_context(closing(server))
        terms.exchange.begin(server.settings[SECRET], len(hosts))
        shown = terms.options.log_ranks
        request = with_settings(request, {JOB: job, **server.settings, OUTPUT: shown})
        stack.enter_context(with_child_exits(signals))
        mpirun = stack.enter_context(started(starter, request, terms.options))
        run = _Run(terms, Attempt(terms, ranks, server, mpirun), server, mpirun, signals)
        stack.enter_context(closing(run.input))
        run.until_all_has_ended()
        history = History(
            ranks,
            mpirun.end,
            run.attempt.stop,
            run.attempt.ended_because,
            {rank: recorded_error(path) for rank, path in ranks.files_of_lost_ranks().items()},
        )
        found = verdict(history)
        _settle(mpirun.output, found.is_complete, terms.options.log_dir)
        tail = mpirun.output.stderr if mpirun.output.is_finished(0.0) else Tail()
        kill = ""
        if found.code == FAILED:
            # A success pays for none of it.
            from mpiddp.launch.supervise.kernel_kills import kernel_kill

            asks = not starter.kind.has_scheduler
            kill = kernel_kill(history, request.hosts, request.job[0], asks=asks)
        cause, at_fault = look_into(history, found, tail, kill)
    ranks.remove_error_files()
    if found.code not in (DONE, BAD_INPUT, STOPPED) and not starter.kind.has_scheduler:
        from mpiddp.launch.orphans import kill_orphans

        silent = ranks.silent_hosts()
        left = [host for host in request.hosts.hosts if host.name not in silent]
        kill_orphans(left, job, request.job[0], request.hosts.transport)
    return Outcome(
        found.code,
        found.sentence,
        found.first,
        run.attempt.stopped_by,
        ranks.announcement,
        bool(ranks.started),
        bool(ranks.steps),
        cause,
        at_fault,
        run.attempt.monitor.slow_hosts,
    )


def with_settings(request: Request, settings: dict[str, str]) -> Request:
    """The request with more variables for the ranks."""
    return request._replace(variables={**request.variables, **settings})


class _Run:
    """The loop of an attempt."""

    def __init__(
        self,
        terms: Terms,
        attempt: Attempt,
        server: ControlServer,
        mpirun: MpirunProcess,
        signals: SignalQueue,
    ) -> None:
        self.attempt = attempt
        self.input = Input()
        self._exchange = terms.exchange
        self._search = terms.search
        self._console = terms.console
        self._server = server
        self._selector = server.selector
        self._mpirun = mpirun
        self._output = mpirun.output
        self._signals = signals
        self._stop_at = terms.stop_at
        self._selector.register(signals, selectors.EVENT_READ, signals)
        if self._search is not None:
            self._selector.register(self._search, selectors.EVENT_READ, self._search)

    def until_all_has_ended(self) -> None:
        while self._mpirun.code is None:
            self._wait()
        self._receive_last_messages()
        if left := self._mpirun.end_orphans(0.0 if self._is_killed else ORPHANS_S):
            processes = ", ".join(map(str, left))
            self._output.log(
                f"processes {processes} cannot be killed: they are blocked in the kernel.",
                is_error=True,
            )
        self._receive_last_output()
        self._mpirun.reap_adopted()

    @property
    def _is_killed(self) -> bool:
        """Whether a second signal asks for an end at once."""
        return self.attempt.stop.by is Stop.AT_ONCE

    def _wait(self, at_most_s: float = LONGEST_WAIT_S) -> None:
        """Wait for sockets, signals and timers, at most `at_most_s`, and handle what has happened."""
        until_s = min(at_most_s, self._selector.next_in_s, self._stop_at - time.monotonic())
        until_s = min(until_s, self._server.next_in_s)
        ready = [key.data for key, _ in self._selector.select(max(0.0, until_s))]
        for data in ready:
            if data is self._search and self._search is not None:
                self.attempt.on_found(self._search.found())
            elif isinstance(data, Listener):
                if viewer := self._console.accept(data, self._selector):
                    self.attempt.on_viewer(viewer, data.kind)
            elif data is not self._signals:
                self._receive(data)
        self._server.expire()
        # After the messages, which the signal's sender may have reacted to.
        if self._signals in ready:
            for arrival in self._signals.receive():
                if arrival.number in STOP_SIGNALS:
                    self.attempt.on_signal(arrival.number)
                elif arrival.number == signal.SIGCHLD:
                    self._mpirun.reap_adopted()
        if self._stop_at <= time.monotonic():
            self._stop_at = float("inf")
            self.attempt.request_stop("--stop-after")
        for event in self._selector.due():
            self.attempt.on(event)

    def _receive(self, data: object) -> None:
        for message in self._server.receive(data):
            if message.kind == "output":
                self._output.add(rank=message.rank, **message.facts)
            elif message.kind == INPUT:
                self.input.add(message.facts["connection"])
            elif message.kind in HANDED_OVER:
                self._exchange.add(message.rank, message.kind, **message.facts)
            elif message.kind == "full":
                self.attempt.on_full(message.facts["error"])
            else:
                self.attempt.on_message(message)

    def _receive_last_messages(self) -> None:
        """Receive the messages that are still in transit, and drop the hosts that do not acknowledge."""
        deadline = time.monotonic() + SILENCE_S
        self._server.end_all(code=1)
        while self._server.has_ranks and time.monotonic() < deadline:
            self._wait(deadline - time.monotonic())
        for message in self._server.drop_silent_hosts():
            self.attempt.ranks.note(message)

    def _receive_last_output(self) -> None:
        """Copy the rest of the output. A second signal ends the wait for a terminal that is stopped."""
        self._selector.clear_timers()
        began_at = time.monotonic()
        while late := self._awaited(self._output.open_ranks):
            if self._output.idle_s > OUTPUT_S:
                self._output.log(
                    f"the last output of {late} has not arrived; it may be missing here.",
                    is_error=True,
                )
                break
            if self._is_killed and time.monotonic() > began_at + KILLED_S:
                break
            self._wait(0.02)
        if late:
            self._mpirun.kill_output_processes()
        self._output.finish()
        while not self._output.is_finished(0.05) and not self._is_killed:
            self._wait(0.05)

    def _awaited(self, open_ranks: Collection[int]) -> str:
        """The names of those whose output may still come, "" for none.

        That of a silent host, and of a rank that does not end, is not waited for.
        """
        ranks, stuck = self.attempt.ranks, self._server.connected
        silent = ranks.silent_hosts()
        late = [r for r in open_ranks if r not in stuck and ranks.hosts[r] not in silent]
        return ranks.names(late) or ("a rank" if self._mpirun.has_output_processes else "")


def _server_address(starter: RankStarter, request: Request) -> str | None:
    """The address of the job channel, None for a Unix socket.

    A container may have a /tmp of its own, without this launcher's socket.
    """
    is_local = all(is_this_host(host.name) for host in request.hosts.hosts)
    has_socket = is_local and not starter.kind.has_scheduler and not request.is_command
    return None if has_socket else request.network.control_address


def _settle(output: JobOutput, is_said: bool, log_dir: str | None) -> None:
    """Show the rest of mpirun's own output, and write what is not shown into the folder of --log-dir."""
    if not output.is_finished(0.0):  # a terminal that is stopped, and a second signal
        return
    left_out = output.settle(is_said=is_said)
    if left_out and log_dir is not None:
        path = Path(log_dir, "mpirun.log")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.write(left_out)
        except OSError as error:
            log.error(f"--log-dir: {path} cannot be written: {error.strerror}.")
