"""One job over all of its attempts: it restarts after a failure, and to grow, on the hosts usable then.

Every restart begins with a preflight of all hosts, like a start. A broken host is left out if the options
allow it, and takes part again once it answers. With `--grow`, a job that could have more ranks stops, saves
and restarts. A restart receives the job's announcement (see `mpiddp.runtime.reports`).
"""

from __future__ import annotations

import json
import os
import time
from contextlib import ExitStack, closing
from pathlib import Path

from mpiddp.errors import BAD_INPUT, DONE, FAILED, INTERRUPTED, STOPPED, JobFailed, UserError
from mpiddp.hosts.names import forget_addresses
from mpiddp.launch import log
from mpiddp.launch.attempt import Terms, run_attempt
from mpiddp.launch.choose import Past, key_of, remember
from mpiddp.launch.events import SignalQueue, interrupting, queued_signals
from mpiddp.launch.exchange import Exchange
from mpiddp.launch.grow import HostSearch
from mpiddp.launch.options import LaunchOptions
from mpiddp.launch.plan import Plan, make_plan, read_hosts
from mpiddp.launch.ranks import NOTHING_ANNOUNCED
from mpiddp.launch.verdict import Outcome, Stop
from mpiddp.protocol.variables import ANNOUNCED, MAX_RESTARTS, RESTART_COUNT, RUN_DIR, RUN_ID
from mpiddp.protocol.viewers import open_console
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
    with queued_signals() as signals:
        return _Job(options, plan, started_at, signals, exchange).run()


class _Job:
    """One job over all of its attempts."""

    def __init__(
        self,
        options: LaunchOptions,
        plan: Plan,
        started_at: float,
        signals: SignalQueue,
        exchange: Exchange | None,
    ) -> None:
        self._options = options
        self._plan = plan  # of the latest attempt
        self._signals = signals
        self._exchange = exchange or Exchange()
        self._console = open_console(Path(options.job.command[0]).name)
        self._named = plan.named  # the latest list of hosts without an error
        began_at = time.monotonic() - (time.time() - started_at)
        stop_after_s = options.stop_after_s
        self._stop_at = float("inf") if stop_after_s is None else began_at + stop_after_s
        self._run_id = os.urandom(8).hex()
        self._known = NOTHING_ANNOUNCED  # by the attempts so far
        self._past = Past(avoided=plan.avoided, enough=len(plan.hosts.usable))
        self._restarts = 0
        self._failures = 0  # restarts that count
        self._in_a_row = 0  # failures without a step between them: the pause grows only for these
        self._at_fault = ""  # the host that ended the latest attempt, by its key
        self._may_grow = options.grow_s is not None
        self._grown_from: Plan | None = None  # until a job on more hosts makes a step

    def run(self) -> Outcome:
        with closing(self._console):
            outcome = self._attempt()
            while planned := self._plan_next(outcome):
                outcome = planned if isinstance(planned, Outcome) else self._attempt()
        return outcome._replace(announcement=self._known)

    def _attempt(self) -> Outcome:
        """Run the latest plan."""
        plan = self._plan
        known = self._known
        settings = {
            RUN_ID: self._run_id,
            RESTART_COUNT: str(self._restarts),
            MAX_RESTARTS: str(self._options.max_restarts),
        }
        if known.global_batch_size is not None:
            batch = {
                "global_batch_size": known.global_batch_size,
                "world_size": known.world_size,
            }
            settings[ANNOUNCED] = json.dumps(batch)
        if known.run_dir:
            settings[RUN_DIR] = known.run_dir
        request = plan.request._replace(job=(*plan.request.job, *known.resume_args))
        try:
            with ExitStack() as stack:
                search = None
                if self._may_grow:
                    search = stack.enter_context(closing(HostSearch(self._options, plan)))
                terms = Terms(
                    *(self._options, self._stop_at, self._exchange, search, self._console), settings
                )
                outcome = run_attempt(terms, plan.starter, request, self._signals)
        except (UserError, JobFailed) as error:
            if not self._restarts:
                raise
            outcome = Outcome(FAILED, str(error))  # the job has started before, and may again
        self._known = known.after(outcome.announcement)
        saved = self._grown_from is not None and self._may_grow and not outcome.made_steps
        # The job stopped to grow, and had saved its steps.
        if saved and outcome.code == INTERRUPTED:
            outcome = outcome._replace(code=STOPPED, sentence="stopped on request.")
        self._remember(outcome)
        if outcome.made_steps:
            self._grown_from = None
        return outcome

    def _remember(self, outcome: Outcome) -> None:
        """Write down how an attempt has ended. A host that ended two in a row is avoided from now on."""
        plan, named, at_fault = self._plan, self._plan.named, ""
        if outcome.host_at_fault:
            at_fault = key_of(outcome.host_at_fault, named)
        if outcome.code in (DONE, FAILED, STOPPED):  # else its user or its input ended it
            remember(
                *(self._options, named),
                used=[key_of(host.name, named) for host in plan.request.hosts.hosts],
                failed={at_fault: outcome.sentence} if at_fault else {},
                slow={key_of(name, named): part for name, part in outcome.slow_hosts.items()},
            )
        before, self._at_fault = self._at_fault, at_fault
        avoided = dict(plan.avoided)
        if at_fault and at_fault == before:
            avoided[at_fault] = f"{at_fault} has ended two attempts in a row"
        max_ranks = self._known.max_ranks
        # Hosts on which mpirun could not even start prove nothing.
        proven = plan.hosts.hosts if outcome.has_started else self._past.proven
        self._past = self._past._replace(avoided=avoided, proven=proven, max_ranks=max_ranks)

    def _plan_next(self, outcome: Outcome) -> Plan | Outcome | None:
        """The plan of the next attempt, None if there is none; an outcome if it cannot be planned."""
        if outcome.stop >= Stop.BY_USER or outcome.code in (DONE, INTERRUPTED):
            return None
        if outcome.stop is Stop.TO_GROW:
            return self._grow(outcome)
        before = self._grown_from
        if before and not outcome.made_steps and outcome.code in (FAILED, BAD_INPUT):
            # Return to the hosts with which the job has run. It does not count.
            outcome.log()
            self._grown_from, self._may_grow = None, False
            return self._begin_again(before)
        if outcome.code == FAILED and self._failures < self._options.max_restarts:
            return self._restart(outcome)
        return None

    def _restart(self, outcome: Outcome) -> Plan | Outcome:
        """Plan a restart after a failure."""
        outcome.log()
        self._failures += 1
        self._in_a_row = 1 if outcome.made_steps else self._in_a_row + 1
        pause_s = min(FIRST_PAUSE_S * 2 ** min(self._in_a_row - 1, 10), LONGEST_PAUSE_S)
        pause_s = max(0.0, min(pause_s, self._stop_at - time.monotonic()))
        if self._signals.has_stop(pause_s) or self._must_stop():
            return INTERRUPTED_BEFORE
        planned = self._planned(INTERRUPTED_BEFORE)
        if isinstance(planned, Outcome):  # a host may be usable after the next pause
            return planned
        count = f" (restart {self._failures} of {self._options.max_restarts})"
        return self._begin_again(planned, count)

    def _grow(self, outcome: Outcome) -> Plan | Outcome:
        """Plan a restart on the hosts that can join. If all ranks have saved, a stop loses no step."""
        interrupted = INTERRUPTED_BEFORE
        if outcome.code == STOPPED:
            interrupted = Outcome(STOPPED, "stopped on request.")
        else:
            outcome.log()
            self._may_grow = False
        before = self._plan
        planned = self._planned(interrupted)
        if planned is interrupted:
            return interrupted
        if isinstance(planned, Outcome):  # the hosts of before have just worked
            log.error(planned.sentence)
            planned = before
        if planned.request.world_size > before.request.world_size:
            self._grown_from = before
        else:  # each search in vain costs a stop and a start
            self._may_grow = False
            log.info("the job has not grown. From now on, hosts join only at a restart.")
        return self._begin_again(planned)

    def _planned(self, interrupted: Outcome) -> Plan | Outcome:
        """A new plan, or why there is none. `interrupted`: if the user stops the job meanwhile."""
        try:
            with interrupting(self._signals):
                planned: Plan | Outcome = self._next_plan()
        except KeyboardInterrupt:
            return interrupted
        except (UserError, JobFailed) as error:
            planned = Outcome(FAILED, str(error))
        return interrupted if self._must_stop() else planned

    def _begin_again(self, plan: Plan, count: str = "") -> Plan:
        """Let the next attempt run this plan, and say so."""
        self._plan = plan
        self._restarts += 1
        request, known = plan.request, self._known
        log.info(f"restarting on {all_of([host.name for host in request.hosts.hosts])}{count}.")
        global_batch_size = known.global_batch_size
        if global_batch_size is not None and request.world_size != known.world_size:
            log.info(
                f"{counted(request.world_size, 'rank')} instead of {known.world_size}; the global batch "
                f"stays at {global_batch_size}."
            )
        return plan

    def _next_plan(self) -> Plan:
        """The plan for the hosts that are listed and usable now.

        A list that is in error is ignored; the latest valid one stays in force.
        """
        forget_addresses()
        try:
            self._named = read_hosts(self._options, os.environ, is_first=False)
        except (UserError, JobFailed) as error:
            log.error(f"{error} The hosts of before are used until the list is right.")
        return make_plan(self._options, os.environ, self._named, self._past)

    def _must_stop(self) -> bool:
        """Whether the user has requested a stop, by a signal or by --stop-after."""
        is_over = self._stop_at <= time.monotonic()
        return is_over or self._signals.has_stop(0.0)


INTERRUPTED_BEFORE = Outcome(INTERRUPTED, "interrupted before a restart.")
