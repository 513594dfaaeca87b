"""One attempt at a job by its agents: record what happens and react, until these wait, or have ended.

All that happens goes into one record (`launch.judge.events`), whose phase decides about the reactions. Other
modules judge it: `hangs`, `stragglers`, `status`, `verdict`. The loop waits for sockets, signals and timers.
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
from mpiddp.launch.run.growth import Growth, ask_in_thread
from mpiddp.launch.run.handover import gone
from mpiddp.launch.run.looks import Looks
from mpiddp.launch.run.output import OUTPUT_S
from mpiddp.launch.run.status import job_facts, status_lines
from mpiddp.protocol.server import LAUNCHER, Event
from mpiddp.protocol.variables import JOIN_TIMEOUT_S, SAVE_GRACE_S

# Time limits for:
# the first rank to start, and once all have, the first to join; disk caches may be cold
START_TIMEOUT_S = 120.0
PROBE_S = 10.0  # ranks to start, before their hosts are asked whether they are still there
SPREAD_S = 3.0  # a failure to reach all ranks by itself
END_S, FAILED_END_S = 2.0, 1.0  # ranks to end after an "end" message; after the failure of one
STOP_S = 5.0  # mpirun to stop its ranks; Open MPI 4.1 takes up to 4 s
HOLD_S = 20.0  # all agents to end their scripts
EXIT_S = 10.0  # mpirun to end once no rank is left
ORPHANS_S = 2.0  # mpirun's orphans to end by themselves
SILENCE_S = 1.0  # a host to acknowledge a message
AT_ONCE_S = 0.5  # the last lines after a second signal
CHECK_S = 1.0  # the next check of the ranks' steps, or of their saves


class Attempt:
    """An attempt by agents that have just started, or begun again: its loop, and its reactions."""

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
        self._shared_names = plan.shared_names
        self.are_waiting = False  # all agents, for the next attempt
        self._timers = self.server.selector
        self._looks = Looks(agents, self.record, self._end_job)
        self._watchers: list[Looks | Growth] = [self._looks]  # of ranks that make steps
        self._signals: set[int] = set()  # that have arrived
        self._has_ended = threading.Event()
        # All ranks may import torch from a slow file system.
        self._start_timeout_s = max(START_TIMEOUT_S, 2 * (self.options.timeout_s or 0))
        self._timers.after(launcher.stop_at - time.monotonic(), self.request_stop)
        self._gone = list[
            str
        ]()  # sentences about hosts that are lost before their ranks have started
        if agents.has_logged_in:
            self._gone = ask_in_thread(self._probe_late, PROBE_S, self._has_ended)
        if not plan.starter.has_scheduler:  # srun may wait for other job steps to end
            self.record.note("limit", seconds=self._start_timeout_s)
        self._see()

    # --- the loop ---

    def run(self) -> Outcome:
        """Wait and react until all agents wait, or until no process of it is left that can be reached."""
        while self.mpirun.code is None and not self.are_waiting:
            self.wait()
            are_held = len(self.record.latest["held"]) == self.record.world_size
            self.are_waiting = are_held and not self.output.open_ranks
        if self.are_waiting:
            self._has_ended.set()
            self._timers.timers.clear()
        else:
            self._finish()
        for rank, lines in self.output.last_errors.items():
            self.record.add(Event("tail", rank, {"lines": lines}))
        self.outcome = verdict(self.record)
        if not self.are_waiting:
            self._clean_up()
        return self.outcome

    def end(self) -> None:
        """End the agents that wait."""
        self._end_after(0.0)
        while self.mpirun.code is None:
            self.wait()
        self._finish()
        self._clean_up()

    def _clean_up(self) -> None:
        started = self.record.latest["started"].values()
        outputs = [output for event in started for output in event.facts.get("outputs", ())]
        self.agents.clean_up(self.outcome, self.record.silent_hosts, outputs)

    def _finish(self) -> None:
        """mpirun has ended. End what it has left, and copy the last output."""
        has_failed_early = self.mpirun.code and self.record.phase is Phase.STARTING
        if has_failed_early and (lost := self._probe_late()):  # as its ssh may have found
            self.record.note("end", failed=False, why="\n".join(lost))
        since = time.monotonic()
        self._end_ranks()  # whose last messages may be in transit
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
        self._has_ended.set()
        self.record.note("mpirun", **self.mpirun.end._asdict())

    def wait(self, until: float = float("inf")) -> None:
        """Wait for sockets, signals and timers, at most until `until`, and handle what has happened."""
        events, numbers = self.agents.wait(until)
        for event in events:
            self.on_event(event)
        for number in numbers:
            self.on_signal(number)
        for reaction in self._timers.due():
            reaction()

    def _copy_the_rest(self) -> None:
        """Copy the last output, as far as it comes in time and somebody reads it.

        A stopped terminal may delay the end, until a second signal.
        """
        record, output, began_at = self.record, self.output, time.monotonic()
        limits = {Stop.NONE: float("inf"), Stop.AT_ONCE: AT_ONCE_S}

        def has_time() -> bool:
            return time.monotonic() <= began_at + limits.get(record.stop, OUTPUT_S)

        while has_time():
            late = {*output.open_ranks} - self.server.connected  # these do not end
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

    # --- what happens ---

    def on_signal(self, number: int) -> None:
        """Take the first signal for a request. Only the same signal again is impatience.

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

        Without a reason, it is time to stop. A script that cannot save runs up to a scheduler's own limit.
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
        """React to what a rank says, or to a viewer."""
        if (
            event.facts.get("host") in self._shared_names
        ):  # its name in the hostfile tells it from others
            host = self.record.hosts[event.rank]
            event = replace(event, facts={**event.facts, "host": host})
        record, facts, rank = self.record, event.facts, event.rank
        exchange, console = self.agents.launcher.exchange, self.agents.launcher.console
        was_starting = record.phase is Phase.STARTING
        self._add(event)
        match event.kind:
            case "output":
                self.output.add(rank=rank, **facts)
            case "input":
                self.output.send_stdin(facts["connection"])
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
                if num_started == 1:  # the others are waited for
                    record.note("limit", seconds=self.options.timeout_s or JOIN_TIMEOUT_S)
                if num_started == record.world_size:
                    record.note("limit", seconds=self._start_timeout_s)
                if record.stop is Stop.BY_USER:
                    self.server.ask([rank], "stop", signal=record.fact("stop", "signal"))
            case "joining":
                if len(record.latest["joining"]) == 1:
                    record.note("limit", seconds=facts["timeout_s"])
                if was_starting and record.phase is Phase.RUNNING:
                    self._run_on()
            case "stopped" if record.stop is Stop.TO_GROW and record.phase is Phase.RUNNING:
                self._begin_grace()
            case "claim" if record.phase < Phase.ENDING:
                self._looks.ask_at_failure()
            case "failed" | "lost" if rank in record.failures and record.phase < Phase.ENDING:
                self._looks.ask_at_failure()
                if event.kind == "failed" and self._may_hold:
                    self._hold()
                else:
                    # Most starters end the other ranks, and the ranks' own watch always does. Only this
                    # process notices a host that has stopped answering.
                    spread_s = SPREAD_S + self.options.failed_grace_s
                    waits_for_word = event.kind == "failed" and self.turn.holds
                    is_now = record.silent_hosts or waits_for_word
                    self._end_after(0.0 if is_now else spread_s, has_failed=True)
        self._looks.see_early()
        is_end = event.kind in ENDS - {"failed"} and not event.from_script
        if is_end and record.own("hold") and not self._has_ended.is_set():  # it does not wait
            self._end_after(0.0, has_failed=True)
        if not self.server.connected and record.silent_hosts and self.agents.has_logged_in:
            self.mpirun.kill_all()  # it would wait for its daemons there
        elif record.done and not self.server.connected and record.phase < Phase.ENDING:
            self._timers.after(EXIT_S, self._end_mpirun)

    def _add(self, event: Event) -> None:
        """Record what a rank has said, until the attempt is over and judged."""
        if event.kind in OF_RANKS and not self._has_ended.is_set():
            self.record.add(event)

    def _see(self) -> None:
        """Look at the job once a second."""
        now = time.monotonic()
        self._timers.after(min(CHECK_S, self.options.hang_timeout_s or CHECK_S), self._see)
        for event in self.server.lose_silent(self._looks.silence_of_lost(now)):
            self.on_event(event)
        match self.record.phase:
            case Phase.STARTING:
                self._see_start(now)
            case Phase.RUNNING if self.record.left:
                self._see_steps(now)
            case Phase.STOPPING:
                self._see_grace(now)

    # --- the start ---

    def _see_start(self, now: float) -> None:
        record, limit = self.record, self.record.own("limit")
        if self._gone:
            self._end_job("\n".join(self._gone))
        elif limit and not record.is_late and now >= limit.at + limit.facts["seconds"]:
            record.note("late")
            if record.latest["started"]:
                self._looks.ask_for_stacks()
                return
            # No other limit would end an mpirun that hangs.
            why = "mpirun or one of its ssh logins hangs. If a start takes that long, raise --timeout."
            self._end_job(f"no rank has started in {limit.facts['seconds']:g} s: {why}")

    def _probe_late(self) -> list[str]:
        """A sentence for each host that is gone, of those whose ranks have not started.

        An mpirun waits minutes for such a host.
        """
        started = self.record.latest["started"]
        late = {host for rank, host in enumerate(self.record.hosts) if rank not in started}
        return gone(self.agents.plan.request, late) if late and self.agents.has_logged_in else []

    # --- steps, stacks, growth ---

    def _run_on(self) -> None:
        """All ranks have joined."""
        self.output.hold_mpirun()
        self._looks.ask_for_calls()
        self._watchers.append(Growth(self.agents, self.turn, self.record, self._has_ended))

    def _see_steps(self, now: float) -> None:
        for watcher in self._watchers:
            watcher.see(now)
        if self.output.shows_status:
            self.output.show_status(status_lines(self.record, now))

    # --- stopping, saving, ending ---

    def _begin_grace(self) -> None:
        """From now on, a time limit counts. Growth has none before a rank has made its last step."""
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
            clause = (
                f"{record.names(late)} had not stopped {limit_s:g} s after the request (--grace)"
            )
            if savers:
                were = "was" if is_one else "were"
                clause = f"{savers} {were} still saving {limit_s:g} s after the request"
            record.note("overdue", clause=clause)
            if record.stop is Stop.BY_USER:
                self._end_mpirun()
            else:
                self._end_job(f"{clause}.")

    def _end_job(self, why: str) -> None:
        self._end_after(0.0, why)

    def _end_after(self, seconds: float, why: str = "", *, has_failed: bool = False) -> None:
        self._begin_end(why, has_failed=has_failed)
        self._timers.after(seconds, self._end_ranks)
        end_s = self.options.failed_grace_s + (FAILED_END_S if has_failed else END_S)
        self._timers.after(seconds + end_s, self._end_mpirun_after_saves)

    def _begin_end(self, why: str = "", *, has_failed: bool = False) -> None:
        """From now on, the ranks are being ended. The first reason counts."""
        if self.record.phase < Phase.ENDING:
            self.record.note("end", failed=has_failed, why=why)
        self.output.hold_mpirun()

    @property
    def _may_hold(self) -> bool:
        """Whether the same agents can make the next attempt."""
        is_whole = len(self.server.connected) == self.record.world_size and not self.record.done
        return self.turn.holds and is_whole and self.record.stop is Stop.NONE

    def _hold(self) -> None:
        """Let all agents end their scripts, and wait for the next attempt."""
        self._end_after(HOLD_S, has_failed=True)
        self.record.note("hold")
        self.server.ask(self.server.connected, "hold", agents=True)

    def _end_ranks(self) -> None:
        self.server.send_all("end", code=1)

    def _end_mpirun_after_saves(self) -> None:
        end = self.record.own("end")
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
