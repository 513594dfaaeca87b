"""One job over all of its attempts: it restarts after a failure, and to grow, on the hosts usable then.

Every restart begins with a preflight of all hosts, like a start. A broken host is left out if the options
allow it, and takes part again once it answers. With `--grow`, a job that could have more ranks stops, saves
and restarts. A restart receives the job's announcement (see `mpiddp.runtime.reports`).
"""

from __future__ import annotations

import json
import os
import time
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

from mpiddp.errors import BAD_INPUT, DONE, FAILED, INTERRUPTED, STOPPED, JobFailed, UserError
from mpiddp.hosts.names import forget_addresses
from mpiddp.launch import log
from mpiddp.launch.attempt import Terms, run_attempt
from mpiddp.launch.choose import Past, key_of, remember
from mpiddp.launch.control import SignalQueue, interrupting, queued_signals
from mpiddp.launch.exchange import Exchange
from mpiddp.launch.grow import HostSearch
from mpiddp.launch.options import LaunchOptions
from mpiddp.launch.plan import Plan, make_plan, read_hosts
from mpiddp.launch.ranks import NOTHING_ANNOUNCED
from mpiddp.launch.verdict import Outcome, Stop
from mpiddp.protocol.variables import ANNOUNCED, MAX_RESTARTS, RESTART_COUNT, RUN_DIR, RUN_ID
from mpiddp.protocol.viewers import Console, open_console, taken
from mpiddp.text import all_of, counted

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0


def run(options: LaunchOptions, started_at: float, exchange: Exchange | None = None) -> Outcome:
    """Plan the job, run it, and restart it after each failure, at most `--max-restarts` times, and to grow.

    Args:
        exchange: of the function that every rank runs, if the job is no script.

    Raises:
        UserError, JobFailed: the first attempt cannot be started. That of a later one is its failure.
    """
    plan = make_plan(options, os.environ)
    began_at = time.monotonic() - (time.time() - started_at)
    stop_at = began_at + (options.stop_after_s or float("inf"))
    name = Path(options.job.command[0]).name
    with queued_signals() as signals, closing(open_console(name)) as console:
        if why := taken():
            log.info(why)
        return _Job(options, plan, stop_at, signals, exchange, console).run()


@dataclass
class _Job:
    """One job over all of its attempts."""

    options: LaunchOptions
    plan: Plan  # of the latest attempt
    stop_at: float  # in time.monotonic()'s seconds
    signals: SignalQueue
    exchange: Exchange | None
    console: Console

    def __post_init__(self) -> None:
        self.named = self.plan.named  # the latest list of hosts without an error
        self.past = Past(enough=len(self.plan.hosts.usable))
        self.known = NOTHING_ANNOUNCED  # by the attempts so far
        self.run_id = os.urandom(8).hex()
        self.restarts = 0
        self.failures = 0  # restarts that count
        self.in_a_row = 0  # failures without a step between them: the pause grows only for these
        self.at_fault = ""  # the host that ended the latest attempt, by its key
        self.may_grow = self.options.grow_s is not None
        self.grown_from: Plan | None = None  # until a job on more hosts makes a step

    def run(self) -> Outcome:
        outcome = self._attempt()
        while planned := self.plan_next(outcome):
            outcome = planned if isinstance(planned, Outcome) else self._attempt()
        return outcome._replace(announcement=self.known)

    def _attempt(self) -> Outcome:
        """Run the latest plan."""
        plan, options = self.plan, self.options
        search = HostSearch(options, plan, self.past.doubts) if self.may_grow else None
        terms = Terms(
            *(options, self.stop_at, self.exchange, search, self.console),
            *(self._settings(), self.known.resume_args),
        )
        try:
            with closing(search) if search else nullcontext():
                outcome = run_attempt(terms, plan.starter, plan.request, self.signals)
        except (UserError, JobFailed) as error:
            if not self.restarts:
                raise
            outcome = Outcome(FAILED, str(error))  # the job has started before, and may again
        self.known = self.known.after(outcome.announcement)
        # The job stopped to grow, and had saved its steps.
        saved = self.grown_from is not None and self.may_grow and not outcome.made_steps
        if saved and outcome.code == INTERRUPTED:
            outcome = outcome._replace(code=STOPPED, sentence=_STOPPED.sentence)
        self.learn_from(outcome)
        if outcome.made_steps:
            self.grown_from = None
        return outcome

    def _settings(self) -> dict[str, str]:
        """The variables that tell the ranks which attempt this is, and what those before have announced."""
        known = self.known
        settings = {
            RUN_ID: self.run_id,
            RESTART_COUNT: str(self.restarts),
            MAX_RESTARTS: str(self.options.max_restarts),
        }
        if known.global_batch_size is not None:
            of_batch = ("global_batch_size", "world_size")
            settings[ANNOUNCED] = json.dumps({name: getattr(known, name) for name in of_batch})
        if known.run_dir:
            settings[RUN_DIR] = known.run_dir
        return settings

    def learn_from(self, outcome: Outcome) -> None:
        """Write down how an attempt has ended. A host that ended two in a row is avoided from now on."""
        plan, named = self.plan, self.plan.named
        at_fault = key_of(outcome.host_at_fault, named) if outcome.host_at_fault else ""
        # Else its user or its input ended it.
        if plan.memory and outcome.code in (DONE, FAILED, STOPPED):
            remember(
                plan.memory,
                used=[key_of(host.name, named) for host in plan.request.hosts.hosts],
                failed={at_fault: outcome.sentence} if at_fault else {},
            )
        doubts = dict(self.past.doubts)
        if at_fault and at_fault == self.at_fault:
            doubts[at_fault] = f"{at_fault} has ended two attempts in a row"
        self.at_fault = at_fault
        self.past = Past(doubts, self.past.enough, self.known.max_ranks)

    def plan_next(self, outcome: Outcome) -> Plan | Outcome | None:
        """The plan of the next attempt, None if there is none; an outcome if it cannot be planned."""
        if outcome.stop >= Stop.BY_USER or outcome.code in (DONE, INTERRUPTED):
            return None
        if outcome.stop is Stop.TO_GROW:
            return self._grow(outcome)
        before = self.grown_from
        if before and not outcome.made_steps and outcome.code in (FAILED, BAD_INPUT):
            # Return to the hosts with which the job has run. It does not count.
            outcome.log()
            self.grown_from, self.may_grow = None, False
            return self._begin_again(before)
        if outcome.code == FAILED and self.failures < self.options.max_restarts:
            return self._restart(outcome)
        return None

    def _restart(self, outcome: Outcome) -> Plan | Outcome:
        """Plan a restart after a failure."""
        outcome.log()
        self.failures += 1
        self.in_a_row = 1 if outcome.made_steps else self.in_a_row + 1
        pause_s = min(FIRST_PAUSE_S * 2 ** min(self.in_a_row - 1, 10), LONGEST_PAUSE_S)
        planned = self._planned(INTERRUPTED_BEFORE, pause_s)
        if isinstance(planned, Outcome):  # a host may be usable after the next pause
            return planned
        count = f" (restart {self.failures} of {self.options.max_restarts})"
        return self._begin_again(planned, count)

    def _grow(self, outcome: Outcome) -> Plan | Outcome:
        """Plan a restart on the hosts that can join. If all ranks have saved, a stop loses no step."""
        has_saved, before = outcome.code == STOPPED, self.plan
        if not has_saved:
            outcome.log()
            self.may_grow = False
        interrupted = _STOPPED if has_saved else INTERRUPTED_BEFORE
        planned = self._planned(interrupted)
        if planned is interrupted:
            return interrupted
        if isinstance(planned, Outcome):  # the hosts of before have just worked
            log.error(planned.sentence)
            planned = before
        if planned.request.world_size > before.request.world_size:
            self.grown_from = before
        else:  # each search in vain costs a stop and a start
            self.may_grow = False
            log.info("the job has not grown. From now on, hosts join only at a restart.")
        return self._begin_again(planned)

    def _planned(self, interrupted: Outcome, pause_s: float = 0.0) -> Plan | Outcome:
        """The plan for the hosts that are listed and usable after a pause, or why there is none.

        A list that is in error is ignored; the latest valid one stays in force.

        Args:
            interrupted: the outcome if the user stops the job meanwhile.
        """
        if self._must_stop(pause_s):
            return interrupted
        try:
            with interrupting():
                forget_addresses()
                try:
                    self.named = read_hosts(self.options, os.environ, is_first=False)
                except (UserError, JobFailed) as error:
                    log.error(f"{error} The hosts of before are used until the list is right.")
                plan = make_plan(self.options, os.environ, self.named, self.past)
        except KeyboardInterrupt:
            return interrupted
        except (UserError, JobFailed) as error:
            return interrupted if self._must_stop() else Outcome(FAILED, str(error))
        return interrupted if self._must_stop() else plan

    def _begin_again(self, plan: Plan, count: str = "") -> Plan:
        """Let the next attempt run this plan, and say so."""
        self.plan = plan
        self.restarts += 1
        request, known = plan.request, self.known
        log.info(f"restarting on {all_of([host.name for host in request.hosts.hosts])}{count}.")
        if known.global_batch_size is not None and request.world_size != known.world_size:
            log.info(
                f"{counted(request.world_size, 'rank')} instead of {known.world_size}; the global batch "
                f"stays at {known.global_batch_size}."
            )
        return plan

    def _must_stop(self, within_s: float = 0.0) -> bool:
        """Whether the user requests a stop, by a signal or by --stop-after, now or within so many seconds."""
        left_s = self.stop_at - time.monotonic()
        return self.signals.has_stop(max(0.0, min(within_s, left_s))) or left_s <= within_s


INTERRUPTED_BEFORE = Outcome(INTERRUPTED, "interrupted before a restart.")
_STOPPED = Outcome(STOPPED, "stopped on request.")
