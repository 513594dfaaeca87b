"""One attempt at a job: record each event and react to it, until the agents wait for the next one, or end.

The record (`launch.judge.events`) is the state of the attempt, and its phase decides how the launcher reacts.
Other modules judge the record: `hangs`, `stragglers`, `status`, `verdict`. The loop waits for sockets,
signals and timers.
"""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import replace
from functools import partial

from mpiddp.hosts.processes import end_all, signal_all
from mpiddp.launch.judge.events import ENDS, OF_RANKS, Phase, Record, Stop
from mpiddp.launch.judge.outcome import Outcome
from mpiddp.launch.judge.verdict import HUNG_UP, verdict
from mpiddp.launch.run.agents import STOP_AFTER, Agents, Turn
from mpiddp.launch.run.growth import Growth
from mpiddp.launch.run.looks import Looks
from mpiddp.launch.run.output import OUTPUT_S
from mpiddp.launch.run.status import job_facts, status_lines
from mpiddp.protocol.server import LAUNCHER, Event
from mpiddp.protocol.terminal import Manners
from mpiddp.protocol.variables import JOIN_TIMEOUT_S, SAVE_GRACE_S

# How long the launcher waits:
START_TIMEOUT_S = 120.0  # for the first rank to start, and then to join: disk caches may be cold
SPREAD_S = 3.0  # for MPI, or the ranks themselves, to end all ranks after a failure
END_S, FAILED_END_S = 2.0, 1.0  # for ranks to end after an "end" message; after a failure
STOP_S = 5.0  # for mpirun to stop its ranks; Open MPI 4.1 takes up to 4 s
HOLD_S = 20.0  # for all agents to end their scripts
AGAIN_S = 5.0  # for all agents to begin the next attempt
EXIT_S = 10.0  # for mpirun to end once no rank is left
ORPHANS_S = 2.0  # for mpirun's orphans to end by themselves
SILENCE_S = 1.0  # for a host to acknowledge a message
AT_ONCE_S = 0.5  # for the last lines after a second signal
CHECK_S = 1.0  # between two checks of the ranks' steps and saves


class Attempt:
    """An attempt by agents that have just started, or that have waited since the attempt before."""

    def __init__(self, agents: Agents, turn: Turn) -> None:
        launcher, plan = agents.launcher, agents.plan
        self.agents, self.turn, self.options = agents, turn, plan.options
        self.server, self.mpirun, self.output = agents.server, agents.mpirun, agents.output
        if launcher.exchange is not None:
            launcher.exchange.begin(self.server)
        hosts, there = plan.request.names_of_ranks, {host.name for host in agents.others}
        logs, name = launcher.logs, f"attempt_{turn.number}.jsonl"
        self.record = Record(
            hosts,
            partial(logs.add, name) if logs else None,
            here=[rank for rank, host in enumerate(hosts) if host not in there],
            attempt=turn.number,
            hang_timeout_s=self.options.hang_timeout_s,
        )
        self.are_waiting = False  # whether all agents wait for the next attempt
        self._timers = self.server.selector
        self._is_over = threading.Event()
        self._looks = Looks(agents, self.record, self._end_job, self._is_over)
        self._watchers: list[Looks | Growth] = [self._looks]  # they see the ranks once a second
        self._signals: set[int] = set()  # the signals that have arrived
        # All ranks may import torch from a slow file system.
        self._start_timeout_s = max(START_TIMEOUT_S, 2 * (self.options.timeout_s or 0))
        self._timers.after(launcher.stop_at - time.monotonic(), self.request_stop)
        if not plan.starter.has_scheduler:  # srun may wait for other job steps to end
            self.record.note("limit", seconds=self._start_timeout_s)
        self._see()

    # --- the loop ---

    def run(self) -> Outcome:
        """Wait and react until all agents wait, or until the launcher reaches no process of the attempt."""
        while self.mpirun.code is None and not self.are_waiting:
            self.wait()
            are_held = len(self.record.latest["held"]) == self.record.world_size
            self.are_waiting = are_held and not self.output.open_ranks
        if self.are_waiting:
            self._is_over.set()
            self._timers.timers.clear()
        else:
            self._finish()
        for rank, lines in self.output.last_errors.items():
            self.record.add(Event("tail", rank, {"lines": lines}))
        self.outcome = verdict(self.record)
        if not self.are_waiting:
            self.agents.clean_up(self.outcome, self.record)
        return self.outcome

    def begin_again(self, turn: Turn) -> bool:
        """Let the agents that wait begin the next attempt, with its server.

        Returns False if some agents do not come, or if the user stops the job meanwhile.
        """
        agents, server = self.agents, self.server
        self.wait(time.monotonic())  # an agent may have been killed meanwhile
        if len(server.connected) < server.world_size:
            return False
        server.stop_listening()
        args = () if agents.first.announced.resume_args else turn.announced.resume_args
        facts = {"variables": turn.variables(), "args": args, "holds": turn.holds}
        server.ask(server.connected, "again", agents=True, **facts)
        deadline = time.monotonic() + AGAIN_S
        while server.has_members and self.mpirun.code is None and time.monotonic() < deadline:
            self.wait(deadline)
        is_stopped = agents.launcher.signals.has_stop()
        if is_stopped or server.has_members or self.mpirun.code is not None:
            return False
        agents.server = server.successor()
        self.output.begin_again()
        return True

    def end(self) -> None:
        """End the agents that wait."""
        self._end_job()
        while self.mpirun.code is None:
            self.wait()
        self._finish()
        self.agents.clean_up(self.outcome, self.record)

    def _finish(self) -> None:
        """mpirun has ended. End the processes that it has left, and copy the last output."""
        has_failed_early = self.mpirun.code and self.record.phase is Phase.STARTING
        if has_failed_early and (lost := self._looks.probe_late()):  # mpirun's ssh may have failed
            self.record.note("end", failed=False, why="\n".join(lost))
        since = time.monotonic()
        self._end_ranks()  # their last messages may be in transit
        while self.server.connected and time.monotonic() < since + SILENCE_S:
            self.wait(since + SILENCE_S)
        silence, longest_s = self.server.silence().items(), time.monotonic() - since
        silent = {rank: silent_s for rank, silent_s in silence if silent_s > longest_s}
        for event in self.server.lose_silent(silent):
            self._add(event)
        grace_s = 0.0 if self.record.stop is Stop.AT_ONCE else ORPHANS_S
        if left := ", ".join(map(str, end_all(self.mpirun.left, grace_s=grace_s))):
            blocked = "cannot be killed: they are blocked in the kernel."
            self.output.log(f"processes {left} {blocked}", is_error=True)
        self._timers.cancel(*self._timers.timers.keys() - {self.request_stop})
        self._copy_the_rest()
        signal_all(partial(self.mpirun.left, agents=True), signal.SIGKILL)
        self._is_over.set()
        self.record.note("mpirun", **self.mpirun.end._asdict())

    def wait(self, until: float = float("inf")) -> None:
        """Wait for sockets, signals and timers, at most until `until`, and react to them."""
        signals = self.agents.launcher.signals
        ready = self._timers.ready(until)
        for data in ready:
            if data not in (self.output, signals):
                for event in self.server.receive(data):
                    self.on_event(event)
        if self.output in ready:  # after "terminal": the echo is off before a password is asked for
            self.output.copy()
        for number in signals.receive() if signals in ready else ():
            self.on_signal(number)
        if signals.has_resized:
            signals.has_resized = False
            if (terminal := self.options.terminal).files:
                self.server.send_all("size", columns=terminal.columns, rows=terminal.rows)
        for reaction in self._timers.due():
            reaction()

    def _copy_the_rest(self) -> None:
        """Copy the last output that arrives in time.

        A terminal that is stopped (Ctrl-S) delays the end until a second signal.
        """
        record, output, began_at = self.record, self.output, time.monotonic()
        limits = {Stop.NONE: float("inf"), Stop.AT_ONCE: AT_ONCE_S}

        def has_time() -> bool:
            return time.monotonic() <= began_at + limits.get(record.stop, OUTPUT_S)

        while has_time():
            late = {*output.open_ranks} - self.server.connected
            late = {rank for rank in late if record.hosts[rank] not in record.silent_hosts}
            if not late and not self.mpirun.left(agents=True):
                break
            # After an outage, TCP sends again within the time that the outage has lasted.
            limit_s = 2 * self.server.lost_s if late and self.agents.others else OUTPUT_S
            if time.monotonic() - output.copied_at > limit_s:
                ranks = record.names(sorted(late)) or "a rank"
                missing = f"the last output of {ranks} has not arrived; it may be missing here."
                output.log(missing, is_error=True)
                break
            self.wait(time.monotonic() + 0.02)
        output.end()
        while output.blocked_since is not None and has_time():
            self.wait(time.monotonic() + 0.05)

    # --- events and signals ---

    def on_signal(self, number: int) -> None:
        """Request a stop at the first signal of a kind. The same signal again kills the ranks at once.

        Schedulers send several kinds while the ranks save: LSF's bkill SIGINT and then SIGTERM, Slurm SIGTERM
        after the signal of --signal.
        """
        is_hung_up = number == signal.SIGHUP  # a closing terminal may send two
        if number not in self._signals:
            self._signals.add(number)
            self.request_stop(HUNG_UP if is_hung_up else signal.Signals(number).name, number)
        elif not is_hung_up:
            self.record.note("kill")
            self._begin_end()
            self.mpirun.kill_all()

    def request_stop(self, reason: str = "", number: int = signal.SIGTERM) -> None:
        """Let all ranks stop within the time limits, unless the user has requested this before.

        Without a reason, the time of --stop-after or of the scheduler is over. If the script cannot save, it
        runs up to the scheduler's own limit.
        """
        record, why_stop = self.record, self.agents.launcher.why_stop
        is_pointless = why_stop != STOP_AFTER and not record.latest["supports_stop"]
        if record.stop >= Stop.BY_USER or (not reason and is_pointless):
            return
        reason = reason or why_stop
        record.note("stop", by=Stop.BY_USER.name, reason=reason, signal=number)
        if record.phase is Phase.ENDING:
            return
        if not self.server.connected:
            self._end_mpirun()
            return
        self.server.ask(self.server.connected, "stop", signal=number)
        self._begin_grace()
        if record.latest["supports_stop"]:
            again = "the same signal again kills them at once."
            self.output.log(f"{reason}: the ranks are saving and stopping; {again}")

    def on_event(self, event: Event) -> None:
        """Record and react to a message of a rank or a viewer."""
        if event.facts.get("host") in self.agents.plan.shared_names:
            # Several hosts call themselves so. The name in the hostfile tells them apart.
            host = self.record.hosts[event.rank]
            event = replace(event, facts={**event.facts, "host": host})
        record, facts, rank = self.record, event.facts, event.rank
        exchange, console = self.agents.launcher.exchange, self.agents.launcher.console
        was_starting = record.phase is Phase.STARTING
        had_failed = bool(record.latest["claim"] or record.failures)
        self._add(event)
        has_failed = bool(record.latest["claim"] or record.failures)
        if has_failed and not had_failed and record.phase < Phase.ENDING:
            # The verdict names the collectives in which the ranks are now, and they end soon.
            self._looks.ask_for_stacks()
        match event.kind:
            case "output":
                self.output.add(rank=rank, **facts)
            case "input":
                self.output.send_stdin(facts["connection"])
            case "terminal" if rank == 0:
                self.output.follow(Manners(facts["echo"], facts["lines"]))
            case "function" | "answer" if exchange is not None:
                exchange.take(event, self.server)
            case "view_job":
                state = job_facts(record, self.output.latest, time.monotonic())
                state |= {"phase": "restarting"} if self.are_waiting else {}
                console.answer(facts["viewer"], **state)
            case "view_stacks" if self.are_waiting:
                between = "no rank runs now: the job restarts."
                console.answer(facts["viewer"], sentence=between, stacks={})
            case "view_stacks":
                self._looks.answer(facts["viewer"])
            case "started":
                num_started = len(record.latest["started"])
                if num_started == 1:  # from now on, the other ranks have limited time
                    record.note("limit", seconds=self.options.timeout_s or JOIN_TIMEOUT_S)
                if num_started == record.world_size:
                    record.note("limit", seconds=self._start_timeout_s)
                if record.stop is Stop.BY_USER:
                    self.server.ask([rank], "stop", signal=record.fact("stop", "signal"))
            case "joining":
                if len(record.latest["joining"]) == 1:
                    record.note("limit", seconds=facts["timeout_s"])
                if was_starting and record.phase is Phase.RUNNING:
                    self.output.hold_mpirun()
                    self._looks.ask_for_calls()
                    if self.turn.grows:
                        self._watchers.append(Growth(self.agents, self.turn, record, self._is_over))
            case "stopped" if record.stop is Stop.TO_GROW and record.phase is Phase.RUNNING:
                self._begin_grace()
            case "failed" | "lost" if rank in record.failures and record.phase < Phase.ENDING:
                if event.kind == "failed" and self._may_hold:
                    # All agents end their scripts, and wait for the next attempt.
                    self._end_job(after_s=HOLD_S, has_failed=True)
                    record.note("hold")
                    self.server.ask(self.server.connected, "hold", agents=True)
                else:
                    # Most MPIs end the other ranks, and so do the ranks themselves. Only this process
                    # notices a host that has stopped answering.
                    spread_s = SPREAD_S + self.options.failed_grace_s
                    waits_for_word = event.kind == "failed" and self.turn.holds
                    is_now = record.silent_hosts or waits_for_word
                    self._end_job(after_s=0 if is_now else spread_s, has_failed=True)
        self._looks.see_early()
        is_end = event.kind in ENDS - {"failed"} and not event.from_script
        if is_end and record.act("hold") and not self._is_over.is_set():
            self._end_job(has_failed=True)  # the other agents wait for this one in vain
        if not self.server.connected and record.silent_hosts and self.agents.has_logged_in:
            self.mpirun.kill_all()  # mpirun would wait for its daemons on the silent hosts
        elif record.done and not self.server.connected and record.phase < Phase.ENDING:
            self._timers.after(EXIT_S, self._end_mpirun)

    def _add(self, event: Event) -> None:
        """Record a message of a rank, until the attempt is over."""
        if event.kind in OF_RANKS and not self._is_over.is_set():
            self.record.add(event)

    def _see(self) -> None:
        """Look at the job once a second."""
        now = time.monotonic()
        self._timers.after(min(CHECK_S, self.options.hang_timeout_s or CHECK_S), self._see)
        self.output.show_growth()
        for event in self.server.lose_silent(self._looks.silence_of_lost(now)):
            self.on_event(event)
        match self.record.phase:
            case Phase.STARTING:
                self._looks.see_start(now)
            case Phase.RUNNING if self.record.left:
                for watcher in self._watchers:
                    watcher.see(now)
                if self.output.shows_status:
                    self.output.show_status(status_lines(self.record, now))
            case Phase.STOPPING:
                self._see_grace(now)

    # --- stopping, saving, ending ---

    def _begin_grace(self) -> None:
        """Begin the time limit of --grace. A stop to grow begins it once a rank has made its last step."""
        self.record.note("grace")
        self.output.hold_mpirun()
        self._timers.after(min(CHECK_S, self.options.grace_s), self._see)

    def _see_grace(self, now: float) -> None:
        """End the ranks that have not stopped in time. A rank that saves has longer."""
        limit_s, record = self.options.grace_s, self.record
        began_at = record.latest["grace"][LAUNCHER].at
        is_over = now >= max(record.last_saved_at, began_at) + limit_s
        savers, is_one = record.names(sorted(record.saving)), len(record.saving) == 1
        if savers and now >= began_at + limit_s:
            limit_s, is_over = SAVE_GRACE_S, now >= began_at + SAVE_GRACE_S
            waiting = f"still saving; waiting for at most {limit_s:g} s."
            self.output.log(f"{savers} {'is' if is_one else 'are'} {waiting}", about="who saves")
        # A reader such as `| less`: ranks that print would never end.
        is_unread = now - (self.output.blocked_since or now) >= OUTPUT_S
        if is_unread or (is_over and not record.left):
            self.output.give_up()
        if is_over and record.left:
            late = [rank for rank in record.left if rank in record.latest["started"]]
            after = f"{limit_s:g} s after the request"
            clause = f"{record.names(late)} had not stopped {after} (--grace)"
            if savers:
                were = "was" if is_one else "were"
                clause = f"{savers} {were} still saving {after}"
            record.note("overdue", clause=clause)
            if record.stop is Stop.BY_USER:
                self._end_mpirun()
            else:
                self._end_job(f"{clause}.")

    def _end_job(self, why: str = "", *, after_s: float = 0, has_failed: bool = False) -> None:
        """End the ranks after some seconds, and then mpirun."""
        self._begin_end(why, has_failed=has_failed)
        self._timers.after(after_s, self._end_ranks)
        end_s = self.options.failed_grace_s + (FAILED_END_S if has_failed else END_S)
        self._timers.after(after_s + end_s, self._end_mpirun_after_saves)

    def _begin_end(self, why: str = "", *, has_failed: bool = False) -> None:
        """Record that the launcher ends the ranks. The first reason counts."""
        if self.record.phase < Phase.ENDING:
            self.record.note("end", failed=has_failed, why=why)
        self.output.hold_mpirun()

    @property
    def _may_hold(self) -> bool:
        """Whether the same agents can make the next attempt."""
        is_whole = len(self.server.connected) == self.record.world_size and not self.record.done
        return self.turn.holds and is_whole and self.record.stop is Stop.NONE

    def _end_ranks(self) -> None:
        self.server.send_all("end", code=1)

    def _end_mpirun_after_saves(self) -> None:
        end = self.record.act("end")
        if end and self.record.saving and time.monotonic() < end.at + SAVE_GRACE_S:
            self._timers.after(CHECK_S, self._end_mpirun_after_saves)
        else:
            self._end_mpirun()

    def _end_mpirun(self) -> None:
        self._begin_end()
        self._timers.cancel(self._end_mpirun)
        self.mpirun.stop()
        # A rank that hangs in a collective does not react, nor does an mpirun whose link is cut.
        self._timers.after(STOP_S, self.mpirun.kill_all)
