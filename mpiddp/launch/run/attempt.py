"""One attempt at a job: agents that have started come in, and its outcome goes out.

    starting → running → stopping → ending → held, or ended         (`Phase` in `launch.judge.events`)

Each message of a rank, each signal and each timer arrives in one loop. The record of all that has happened is
the state of the attempt. The attempt reacts to it, and watchers look on (`launch.run.watchers`).
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Set
from dataclasses import replace
from typing import Any

from mpiddp.errors import FAILED, fault
from mpiddp.hosts.processes import end_all
from mpiddp.launch import log
from mpiddp.launch.judge.events import ENDS, KINDS, OF_RANKS, Outcome, Phase, Record, Stop
from mpiddp.launch.judge.hangs import find_hang
from mpiddp.launch.judge.verdict import HUNG_UP, may_be_preempted, verdict
from mpiddp.launch.plan.job_plan import Plan
from mpiddp.launch.run.agents import STOP_AFTER, Agents, orders_of
from mpiddp.launch.run.output import OUTPUT_S, JobOutput
from mpiddp.launch.run.requeue import is_preempted
from mpiddp.protocol.server import LAUNCHER, Event
from mpiddp.protocol.variables import SAVE_GRACE_S

# How long the launcher waits:
SPREAD_S = 3.0  # for MPI, or the ranks themselves, to end all ranks after a failure
END_S, FAILED_END_S = 2.0, 1.0  # for ranks to end after an "end" message; after a failure
STOP_S = 5.0  # for mpirun to stop its ranks; Open MPI 4.1 takes up to 4 s
HOLD_S = 20.0  # for all agents to end their scripts
AGAIN_S = 5.0  # for all agents to begin the next attempt
EXIT_S = 10.0  # for mpirun to end once no rank is left
ORPHANS_S = 2.0  # for mpirun's orphans to end by themselves
SILENCE_S = 1.0  # for a host to acknowledge a message
AT_ONCE_S = 0.5  # for the last lines after a second signal
LOOK_S = 1.0  # between two looks of the watchers
STACKS_S, INTERRUPTED_S = 4.0, 1.0  # for ranks to send their stacks, and after an interrupt


class Watcher:
    """Looks on while an attempt runs. It may ask ranks, print sentences, or stop the attempt.

    To end the job, it asks for stacks (`Attempt.ask_for_stacks`), then judges again, because a step may have come
    meanwhile, and calls `Attempt.stop_ranks` with the reason: a failure, which --max-restarts counts. `mpiddp explain`
    knows a reason that begins with "the job hung and was stopped:".

    `remark` is a sentence for the status and for viewers, as long as it is true.
    """

    remark = ""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt, self.plan, self.record = attempt, attempt.plan, attempt.record
        self.launcher, self.server = attempt.agents.launcher, attempt.server
        self.output, self.timers = attempt.output, attempt.timers

    def on_event(self, event: Event) -> None:
        """Called with each event, once it is recorded and before the attempt reacts to it."""

    def look(self, now: float) -> None:
        """Called once a second until the attempt is over."""

    def notice(self, **facts: Any) -> None:
        """Record for a reader what this watcher has seen."""
        self.attempt.add_act("noticed", by=type(self).__name__, **facts)


class Attempt:
    """An attempt by agents that have just started, or that have waited since the attempt before."""

    def __init__(self, agents: Agents, watchers: Iterable[type[Watcher]]) -> None:
        self.agents, self.plan = agents, agents.plan
        self.server, self.mpirun, self.output = agents.server, agents.mpirun, agents.output
        hosts, there = self.plan.request.names_of_ranks, {host.name for host in agents.others}
        self.record = Record(
            hosts,
            here=[rank for rank, host in enumerate(hosts) if host not in there],
            attempt=self.plan.past.attempts + 1,
            hang_timeout_s=self.plan.options.hang_timeout_s,
        )
        self.timers = self.server.selector
        self.outcome = Outcome(FAILED, is_complete=False)  # until the verdict
        self._unseen = deque[Event]()  # events that the watchers see next
        # Of the ranks that are being asked for their stacks, and of the watchers that have asked.
        self._asked: Set[int] = frozenset()
        self._wanted: list[tuple[Callable[[], None], Callable[[], bool]]] = []
        self._watchers = [watcher(self) for watcher in watchers]

    # --- the loop ---

    def run(self) -> Outcome:
        """Wait and react until all agents wait, or until the launcher reaches no process of the attempt.

        Whatever is raised meanwhile, no process of the attempt remains, unless all agents wait.
        """
        waits = False
        try:
            self.timers.after(self.agents.launcher.stop_at - time.monotonic(), self.request_stop)
            for watcher in self._watchers[:]:
                self.let(watcher.on_event, self.record.latest["began"][LAUNCHER])
            self.look()
            while self.mpirun.code is None and self.record.phase < Phase.HELD:
                self.wait()
                are_held = len(self.record.latest["held"]) == self.record.world_size
                if are_held and not self.output.open_ranks:
                    self.add_act("over")
            if self.record.phase is Phase.HELD:
                self.timers.timers.clear()
            else:
                self._finish()
            for rank, lines in self.output.last_errors.items():
                self._show(Event("tail", rank, {"lines": lines}))
            if may_be_preempted(self.record) and is_preempted(os.environ):
                self.add_act("preempted")
            self.outcome = verdict(self.record)
            waits = self.record.phase is Phase.HELD
            return self.outcome
        finally:
            if not waits:
                self.agents.clean_up(self.outcome, self.record)

    def let(self, call: Callable[..., None], *args: object) -> None:
        """Make this call. If it is of a watcher or of the output and fails, the job goes on without that."""
        owner = getattr(getattr(call, "func", call), "__self__", self)  # of a method, or a partial
        try:
            call(*args)
        except Exception as error:
            if not isinstance(owner, Watcher | JobOutput):
                raise
            self._watchers = [watcher for watcher in self._watchers if watcher is not owner]
            if owner is self.output:
                self.output.give_up()
            what = f"the launcher's {type(owner).__name__} has failed ({fault(error)})"
            log.error(f"{what}. The job goes on without it.")

    def wait(self, until: float = float("inf")) -> None:
        """Wait for sockets, signals and timers, at most until `until`, and react to them."""
        signals = self.agents.launcher.signals
        ready = self.timers.ready(until)
        for data in ready:
            if data not in (self.output, signals):
                for event in self.server.receive(data):
                    self.on_event(event)
        if self.output in ready:  # after "terminal": the echo is off before a password is asked for
            self.let(self.output.copy)
        for number in signals.receive() if signals in ready else ():
            self.on_signal(number)
        if signals.has_resized:
            signals.has_resized = False
            if (terminal := self.plan.options.terminal).files:
                self.server.send_all("size", columns=terminal.columns, rows=terminal.rows)
        for reaction in self.timers.due():
            self.let(reaction)

    def look(self) -> None:
        """Let the watchers look, once a second."""
        now = time.monotonic()
        self.timers.after(min(LOOK_S, self.plan.options.hang_timeout_s or LOOK_S), self.look)
        for watcher in self._watchers:
            self.let(watcher.look, now)

    # --- events ---

    def add_act(self, kind: str, at: float | None = None, **facts: object) -> None:
        """Record an act of the launcher, at this time or now."""
        self._show(Event(kind, facts=facts, at=time.monotonic() if at is None else at))

    @property
    def remark(self) -> str:
        """A sentence of the watchers about the attempt, or ""."""
        return next((watcher.remark for watcher in self._watchers if watcher.remark), "")

    def _show(self, event: Event) -> None:
        """Record an event, and show it to all watchers before a later one, which one of them may cause."""
        if event.kind in KINDS:
            self.record.add(event)
        self._unseen.append(event)
        if len(self._unseen) > 1:  # a watcher has caused this one, and the loop below shows it
            return
        while self._unseen:
            for watcher in self._watchers:
                self.let(watcher.on_event, self._unseen[0])
            self._unseen.popleft()
        if self._wanted and not self._unanswered:
            self.timers.after(0.0, self._close)  # once the attempt has reacted to this event

    def on_event(self, event: Event) -> None:
        """Record a message of a rank or a viewer, show it to the watchers, and react to it."""
        record, rank = self.record, event.rank
        if event.kind in OF_RANKS and record.phase >= Phase.HELD:
            return
        if event.facts.get("host") in self.plan.shared_names:
            # Several hosts call themselves so. The name in the hostfile tells them apart.
            event = replace(event, facts={**event.facts, "host": record.hosts[rank]})
        self._show(event)
        if event.kind == "started" and record.stop is Stop.BY_USER:
            self.server.ask([rank], "stop", signal=record.fact("stop", "signal"))
        elif event.kind in ENDS and rank in record.failures and record.phase < Phase.ENDING:
            self._stop_after_failure(event)
        is_end = event.kind in ENDS - {"failed"} and not event.from_script
        if is_end and record.act("hold"):
            self.stop_ranks(has_failed=True)  # the other agents wait for this one in vain
        if not self.server.connected and record.silent_hosts and self.agents.others:
            self.mpirun.kill_all()  # mpirun would wait for its daemons on the silent hosts
        elif record.done and not self.server.connected and record.phase < Phase.ENDING:
            self.timers.after(EXIT_S, self.stop_mpirun)

    # --- the stacks of the scripts ---

    def ask_for_stacks(
        self, then: Callable[[], None], interrupts: Callable[[], bool] = lambda: False
    ) -> None:
        """Ask all ranks for the stacks of their scripts, once for all watchers that want them now.

        `then` is called when all have answered, or the time is over. If `interrupts` returns True before,
        agents interrupt scripts that do not answer. They may only be slow, so the job has to end anyway.
        """
        self._wanted.append((then, interrupts))
        if len(self._wanted) == 1:
            self._asked = {*self.server.connected}
            self.timers.after(STACKS_S, self._interrupt)
            self.timers.after(STACKS_S + INTERRUPTED_S, self._close)
            self.add_act("asked")
            self.server.ask(self._asked, "stacks")

    @property
    def _unanswered(self) -> Set[int]:
        record = self.record
        return self._asked - record.stacks.keys() - record.done.keys() - record.failures.keys()

    def _interrupt(self) -> None:
        if any(interrupts() for _, interrupts in self._wanted):
            self.server.ask(self._unanswered, "stacks", agents=True)

    def _close(self) -> None:
        self.timers.cancel(self._interrupt, self._close)
        wanted, self._wanted = self._wanted, []
        for then, _ in wanted:
            self.let(then)

    # --- stopping on request ---

    def on_signal(self, number: int) -> None:
        """Request a stop at the first signal of a kind. The same signal again kills the ranks at once.

        Schedulers send several kinds while the ranks save: LSF's bkill SIGINT and then SIGTERM, Slurm SIGTERM
        after the signal of --signal.
        """
        is_hung_up = number == signal.SIGHUP  # a closing terminal may send two
        if self.agents.launcher.signals.counts[number] == 1:
            self.request_stop(HUNG_UP if is_hung_up else signal.Signals(number).name, number)
        elif not is_hung_up:
            self.add_act("kill")
            self._note_end()
            self.mpirun.kill_all()

    def request_stop(self, reason: str = "", number: int | None = None) -> None:
        """Let all ranks stop within the time limits, unless the user has requested this before.

        Without a reason, the time of --stop-after or of the scheduler is over, which acts as Ctrl-C. If the
        script cannot save, it runs up to the scheduler's own limit.
        """
        record, why_stop = self.record, self.agents.launcher.why_stop
        is_pointless = why_stop != STOP_AFTER and not record.latest["supports_stop"]
        if record.stop >= Stop.BY_USER or (not reason and is_pointless):
            return
        sent = number or self.agents.launcher.signals.of_ctrl_c
        reason = reason or why_stop
        hang = find_hang(record, self.output.copied_at)
        self.add_act(
            "stop",
            by=Stop.BY_USER.name,
            reason=reason,
            signal=sent,
            hang=hang.sentence if hang else "",
        )
        if record.phase >= Phase.ENDING:
            return
        if not self.server.connected:
            self.stop_mpirun()
            return
        self.server.ask(self.server.connected, "stop", signal=sent)
        self.add_act("grace")
        what = f"have {self.plan.options.grace_s:g} s to end (--grace)"
        what = "are saving and stopping" if record.latest["supports_stop"] else what
        again = (
            "" if number in (None, signal.SIGHUP) else "; the same signal again kills them at once"
        )
        self.output.log(f"{reason}: the ranks {what}{again}.")

    # --- ending the ranks, and then mpirun ---

    def _stop_after_failure(self, event: Event) -> None:
        """A rank has failed, or its connection has ended. End the others, or let their agents wait."""
        is_whole = len(self.server.connected) == self.record.world_size and not self.record.done
        waits_for_word = event.kind == "failed" and self.plan.holds
        if waits_for_word and is_whole and self.record.stop is Stop.NONE:
            # All agents end their scripts, and wait for the next attempt.
            self.stop_ranks(after_s=HOLD_S, has_failed=True)
            self.add_act("hold")
            self.server.ask(self.server.connected, "hold", agents=True)
            return
        # Most MPIs end the other ranks, and so do the ranks themselves. Only this process notices a host that
        # has stopped answering.
        spread_s = SPREAD_S + self.plan.options.failed_grace_s
        is_now = self.record.silent_hosts or waits_for_word
        self.stop_ranks(after_s=0 if is_now else spread_s, has_failed=True)

    def stop_ranks(self, why: str = "", *, after_s: float = 0, has_failed: bool = False) -> None:
        """End the ranks after some seconds, and then mpirun."""
        self._note_end(why, has_failed=has_failed)
        self.timers.after(after_s, self._tell_ranks)
        end_s = self.plan.options.failed_grace_s + (FAILED_END_S if has_failed else END_S)
        self.timers.after(after_s + end_s, self._stop_mpirun_after_saves)

    def _note_end(self, why: str = "", overdue: str = "", *, has_failed: bool = False) -> None:
        """Record that the launcher ends the ranks. The first reason counts."""
        if self.record.phase < Phase.ENDING:
            self.add_act("end", failed=has_failed, why=why, overdue=overdue)

    def _tell_ranks(self) -> None:
        self.server.send_all("end", code=1)

    def _stop_mpirun_after_saves(self) -> None:
        end = self.record.act("end")
        if end and self.record.saving and time.monotonic() < end.at + SAVE_GRACE_S:
            self.timers.after(LOOK_S, self._stop_mpirun_after_saves)
        else:
            self.stop_mpirun()

    def stop_mpirun(self, overdue: str = "") -> None:
        """Let mpirun end its ranks: those that the clause `overdue` names have not stopped in time."""
        self._note_end(overdue=overdue)
        self.timers.cancel(self.stop_mpirun)
        self.mpirun.stop()
        # A rank that hangs in a collective does not react, nor does an mpirun whose link is cut.
        self.timers.after(STOP_S, self.mpirun.kill_all)

    # --- held: the agents wait, and begin the next attempt, or end ---

    def begin_again(self, plan: Plan) -> bool:
        """Let the agents that wait begin the next attempt, by its plan and with its server.

        Returns False if some agents do not come, or if the user stops the job meanwhile.
        """
        agents, server = self.agents, self.server
        self.wait(time.monotonic())  # an agent may have been killed meanwhile
        if len(server.connected) < server.world_size:
            return False
        server.stop_listening()
        orders = orders_of(agents.launcher, plan, server)._replace(
            key=""
        )  # agents know the next key
        server.ask(server.connected, "again", agents=True, orders=orders.packed())
        deadline = time.monotonic() + AGAIN_S
        while server.has_members and self.mpirun.code is None and time.monotonic() < deadline:
            self.wait(deadline)
        is_stopped = agents.launcher.signals.has_stop()
        if is_stopped or server.has_members or self.mpirun.code is not None:
            return False
        agents.plan, agents.server = plan, server.successor()
        self.output.begin_again()
        return True

    def end_agents(self) -> None:
        """End the agents that wait."""
        try:
            self.stop_ranks()
            while self.mpirun.code is None:
                self.wait()
            self._finish()
        finally:
            self.agents.clean_up(self.outcome, self.record)

    # --- ended ---

    def _finish(self) -> None:
        """mpirun has ended. End the processes that it has left, and copy the last output."""
        starter, code, was_ended = self.mpirun.starter, self.mpirun.code, self.mpirun.was_ended
        facts = {"proves_signals": starter.proves_signals, "was_ended": was_ended}
        self.add_act("mpirun", name=starter.program.name, code=code, **facts)
        since = time.monotonic()
        self._tell_ranks()  # their last messages may be in transit
        while self.server.connected and time.monotonic() < since + SILENCE_S:
            self.wait(since + SILENCE_S)
        silence, longest_s = self.server.silence().items(), time.monotonic() - since
        silent = {rank: silent_s for rank, silent_s in silence if silent_s > longest_s}
        for event in self.server.lose_silent(silent):
            self._show(event)
        grace_s = 0.0 if self.record.stop is Stop.AT_ONCE else ORPHANS_S
        if left := ", ".join(map(str, end_all(self.mpirun.left, grace_s=grace_s))):
            blocked = "cannot be killed: they are blocked in the kernel."
            self.output.log(f"processes {left} {blocked}", is_error=True)
        self.timers.cancel(*self.timers.timers.keys() - {self.request_stop})
        self._copy_the_rest()

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
        self.add_act("over")
        output.end_streams()
        while output.blocked_since is not None and has_time():
            self.wait(time.monotonic() + 0.05)
