"""One job over all of its attempts: it restarts after a failure, and to grow, on the hosts usable then.

Every restart begins with a preflight of all hosts, like a start. A broken host is left out if the options
allow it, and takes part again once it answers. With `--grow`, a job that could have more ranks stops, saves
and restarts. A restart receives the job's announcement (see `mpiddp.runtime.reports`).
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace

from mpiddp.errors import DONE, FAILED, INTERRUPTED, STOPPED, JobFailed, UserError
from mpiddp.hosts import history
from mpiddp.hosts.hostfile import Hosts
from mpiddp.hosts.names import forget_addresses
from mpiddp.hosts.ssh import Logins
from mpiddp.launch import log, policy
from mpiddp.launch.agents import Agents, Launcher, Turn
from mpiddp.launch.control import Console, Exchange, SignalQueue
from mpiddp.launch.events import Announcement, Stop
from mpiddp.launch.handover import CutOff
from mpiddp.launch.options import LaunchOptions
from mpiddp.launch.place import Past, key_of
from mpiddp.launch.plan import Plan, make_plan, plan_without, read_hosts
from mpiddp.launch.policy import Move
from mpiddp.launch.report import Report
from mpiddp.launch.verdict import Outcome
from mpiddp.protocol.channel import DEFAULT_RANKS
from mpiddp.text import all_of, counted


def run(
    options: LaunchOptions, started_at: float, report: Report, exchange: Exchange | None = None
) -> Outcome:
    """Plan the job, run it, and restart it after each failure, at most `--max-restarts` times, and to grow.

    Raises UserError or JobFailed if the first attempt cannot be started, and KeyboardInterrupt before it has.
    """
    logins = Logins()
    stop_at = started_at + (options.stop_after_s or float("inf"))
    with closing(logins), ExitStack() as stack:
        signals = stack.enter_context(closing(SignalQueue()))
        console = stack.enter_context(closing(Console(report.name)))
        with signals.interrupting():
            plan = make_plan(options, os.environ, logins=logins)
        # A restart finds what was pushed, and has pauses of its own.
        options = replace(options, push=False, wait_s=None)
        log_dir = options.log_dir or report.folder
        job = Job(
            Launcher(options, signals, console, stop_at, exchange, log_dir, logins), plan, report
        )
        stack.enter_context(closing(job))
        planned: Plan | Outcome | None = plan
        while planned is not None:
            outcome = planned if isinstance(planned, Outcome) else job.attempt()
            planned = job.plan_next(outcome)
        return outcome._replace(announcement=job.known)


@dataclass
class Job:
    """One job over all of its attempts.

    Of its signals, the first requests a stop of the ranks. The second kills all processes of the job on this
    host, and its daemons on other hosts then end too.
    """

    launcher: Launcher
    plan: Plan  # of the latest attempt
    report: Report
    agents: Agents | None = None  # of the latest attempt
    latest: Outcome | None = None
    attempts: int = 0  # that have begun
    failures: list[Outcome] = field(default_factory=list)  # that count, see `next_move`
    at_fault: str = ""  # the host that ended the latest attempt, by its key
    has_hinted: bool = False  # at the output that was not shown
    grown_from: Plan | None = None  # until a job on more hosts makes a step
    is_stopped: bool = False  # by a request that came between two attempts

    def __post_init__(self) -> None:
        self.options, self.signals = self.launcher.options, self.launcher.signals
        self.known = Announcement()  # by the attempts so far
        self.doubts: dict[str, str] = {}  # see Past
        self.enough = len(self.plan.hosts.usable)
        self.may_grow = self.options.grow_s is not None

    def close(self) -> None:
        self._end_agents()

    def attempt(self) -> Outcome:
        """Run the latest plan, and learn from it. A host that ended two in a row is avoided from now on."""
        self.attempts += 1
        began_at = time.time()
        try:
            outcome = self._run_without_cut_off()
        except KeyboardInterrupt:  # before mpirun has started
            outcome = Outcome(INTERRUPTED, "interrupted.", stop=Stop.BY_USER)
        except (UserError, JobFailed) as error:
            if self.attempts == 1:
                raise
            outcome = Outcome(FAILED, str(error))  # the job has started before, and may again
        self.latest = outcome
        self.known = self.known.after(outcome.announcement)
        if outcome.made_steps:
            self.grown_from = None
        if self.grown_from and self.may_grow and outcome.code == INTERRUPTED:
            # The job stopped to grow, and had saved its steps.
            outcome = outcome._replace(code=STOPPED, sentence=_STOPPED.sentence)
        plan = self.plan
        at_fault = outcome.host_at_fault and key_of(outcome.host_at_fault, plan.named)
        # Else its user or its input ended it.
        if plan.memory and outcome.code in (DONE, FAILED, STOPPED):
            used = [key_of(host.name, plan.named) for host in plan.request.hosts.hosts]
            history.note(plan.memory, used, {at_fault: outcome.sentence} if at_fault else {})
        if at_fault and at_fault == self.at_fault:
            self.doubts[at_fault] = f"{at_fault} has ended two attempts in a row"
        self.at_fault = at_fault
        if outcome.first and outcome.first.rank and not self.has_hinted:
            self.has_hinted = True
            outcome = outcome._replace(hint=_not_shown(self.options, plan))
        self.report.add(
            began_at, plan.request.names_of_ranks, outcome._replace(announcement=self.known)
        )
        return outcome

    def _run_without_cut_off(self) -> Outcome:
        """Run the latest plan, in the agents that wait if it is theirs.

        Hosts that the others do not reach are left out if enough are left. Else CutOff is raised.
        """
        avoided = tuple(self.doubts)
        turn = Turn(self.attempts, self.known, self._may_hold, self.may_grow, avoided)
        agents = self.agents
        outcome = None
        if agents is not None and agents.are_waiting and agents.plan is self.plan:
            outcome = agents.attempt(turn)
        if outcome is not None:
            return outcome
        self._end_agents()
        if self.is_stopped:  # the request came to agents that have not begun
            return INTERRUPTED_BEFORE
        while True:
            try:
                self.agents = Agents(self.launcher, self.plan, turn)
            except CutOff as cut_off:
                try:
                    self.plan = plan_without(self.options, self.plan, cut_off.failures)
                except UserError:  # too few are left
                    raise cut_off from None
            else:
                outcome = self.agents.attempt(turn)
                assert outcome is not None  # the first one always begins
                return outcome

    @property
    def _may_hold(self) -> bool:
        """Whether a failure of the next attempt may be followed by a restart in the same agents.

        A host that was left out may join at a restart, which then needs new agents.
        """
        has_all = len(self.plan.hosts.hosts) == len(self.plan.named.hosts)
        return has_all and len(self.failures) < self.options.max_restarts

    def _end_agents(self) -> None:
        """End the agents that wait for an attempt."""
        if self.agents is not None:
            self.agents.end(self.latest or Outcome(FAILED))
            self.is_stopped |= self.agents.are_stopped
            self.agents = None

    def plan_next(self, outcome: Outcome) -> Plan | Outcome | None:
        """The plan of the next attempt, None if there is none; an outcome if it cannot be planned."""
        most, before = self.options.max_restarts, self.grown_from
        match policy.next_move(outcome, self.failures, most, has_grown=before is not None):
            case Move.GROW:
                return self._grow(outcome)
            case Move.SHRINK if before is not None:
                outcome.log()
                self.grown_from, self.may_grow = None, False
                return self._begin_again(before)
            case Move.RESTART:
                outcome.log()
                self.failures.append(outcome)
                planned = self._planned(INTERRUPTED_BEFORE, policy.pause_s(self.failures))
                if isinstance(planned, Outcome):  # a host may be usable after the next pause
                    return planned
                return self._begin_again(planned, f" (restart {len(self.failures)} of {most})")
        return None

    def _grow(self, outcome: Outcome) -> Plan | Outcome:
        """Plan a restart on the hosts that can join. If all ranks have saved, a stop loses no step."""
        interrupted, before = _STOPPED, self.plan
        if outcome.code != STOPPED:
            outcome.log()
            interrupted, self.may_grow = INTERRUPTED_BEFORE, False
        planned = self._planned(interrupted)
        if planned is interrupted:
            return interrupted
        if isinstance(planned, Outcome):  # the hosts of before have just worked
            log.error(planned.sentence)
            planned = before
        if planned.request.hosts.world_size > before.request.hosts.world_size:
            self.grown_from = before
        else:  # each search in vain costs a stop and a start
            self.may_grow = False
            log.info("the job has not grown. From now on, hosts join only at a restart.")
        return self._begin_again(planned)

    def _planned(self, interrupted: Outcome, pause_s: float = 0.0) -> Plan | Outcome:
        """The plan for the hosts that are listed and usable after a pause, or why there is none.

        A list that is in error is ignored; that of the latest attempt stays in force. `interrupted` is the
        outcome if the user stops the job meanwhile.
        """
        if self._must_stop(pause_s):
            return interrupted
        planned: Plan | Outcome
        try:
            with self.signals.interrupting():
                forget_addresses()
                named = self.plan.named
                try:
                    named = read_hosts(self.options, os.environ, is_first=False)
                except (UserError, JobFailed) as error:
                    log.error(f"{error} The hosts of before are used until the list is right.")
                if self._fits(named):
                    return self.plan
            self._end_agents()  # as a whole: a signal is a request to them
            with self.signals.interrupting():
                past = Past(named, self.doubts, self.enough, self.known.max_ranks)
                planned = make_plan(self.options, os.environ, past, self.launcher.logins)
        except KeyboardInterrupt:
            return interrupted
        except (UserError, JobFailed) as error:
            planned = Outcome(FAILED, str(error))
        return interrupted if self._must_stop() else planned

    def _fits(self, named: Hosts) -> bool:
        """Whether the agents that wait can make the next attempt, on these hosts."""
        plan, agents, most = self.plan, self.agents, self.known.max_ranks
        if (
            agents is None
            or not agents.are_waiting
            or named != plan.named
            or plan is not agents.plan
        ):
            return False
        if agents.complaints:
            log.error(agents.complaints)
        used = {key_of(host.name, named) for host in plan.request.hosts.hosts}
        is_doubted = len(used) > 1 and bool(used & self.doubts.keys())
        size = plan.request.hosts.world_size
        return not (agents.complaints or is_doubted or size > (most or size))

    def _begin_again(self, plan: Plan, count: str = "") -> Plan:
        """Let the next attempt run this plan, and say so."""
        self.plan = plan
        hosts, known = plan.request.hosts, self.known
        log.info(f"restarting on {all_of([host.name for host in hosts.hosts])}{count}.")
        if known.global_batch_size is not None and hosts.world_size != known.world_size:
            ranks = f"{counted(hosts.world_size, 'rank')} instead of {known.world_size}"
            log.info(f"{ranks}; the global batch stays at {known.global_batch_size}.")
        return plan

    def _must_stop(self, within_s: float = 0.0) -> bool:
        """Whether the user requests a stop, by a signal or by --stop-after, now or within so many seconds."""
        left_s = self.launcher.stop_at - time.monotonic()
        return (
            self.is_stopped
            or self.signals.has_stop(max(0.0, min(within_s, left_s)))
            or left_s <= within_s
        )


def _not_shown(options: LaunchOptions, plan: Plan) -> str:
    """What a failed job has printed and nobody has seen; "" if all of it was shown or kept."""
    last = plan.request.hosts.world_size - 1
    if options.log_ranks != DEFAULT_RANKS or options.log_dir or last < 1:
        return ""
    ranks = "rank 1" if last == 1 else f"ranks 1 to {last}"
    return f"the stdout of {ranks} was not shown. To show it: --log-ranks all. To keep it: --log-dir DIR"


INTERRUPTED_BEFORE = Outcome(INTERRUPTED, "interrupted before a restart.")
_STOPPED = Outcome(STOPPED, "stopped on request.")
