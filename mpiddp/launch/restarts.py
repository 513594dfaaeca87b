"""Restart a failed job from its newest checkpoint, on the hosts that are usable then, and a growing one.

Every restart begins with a preflight of all hosts, like a start. A broken host is left out if the options
allow it, and takes part again once it answers. With `--grow`, a job that could have more ranks stops for
them. A restart receives the job's announcement (see `mpiddp.runtime.launcher.announcement`).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from mpiddp.errors import BAD_INPUT, DONE, FAILED, INTERRUPTED, STOPPED, JobFailed, UserError
from mpiddp.launch import log
from mpiddp.launch.options import LaunchOptions
from mpiddp.launch.plan import Plan
from mpiddp.launch.replan import Planner
from mpiddp.launch.starters.command import Request
from mpiddp.launch.starters.detect import RankStarter
from mpiddp.launch.supervise.attempt import Outcome, attempt
from mpiddp.launch.supervise.exchange import Exchange
from mpiddp.launch.supervise.growing import HostWatch, Look
from mpiddp.launch.supervise.job_state import NOTHING_ANNOUNCED, Announcement
from mpiddp.launch.supervise.limits import Limits
from mpiddp.launch.supervise.output import Shown
from mpiddp.launch.supervise.signals import SignalQueue, queued_signals, stop_is_requested
from mpiddp.protocol.variables import ANNOUNCED, MAX_RESTARTS, RESTART_COUNT, RUN_DIR, RUN_ID
from mpiddp.text import all_of, duration

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
FOLDER_AWAY_S = 600.0  # longest wait for a working folder whose file server is away
START_TIMEOUT_S = 120.0  # until the first rank has started; disk caches may be cold


@dataclass(frozen=True)
class _Known:
    """What the attempts have announced so far. The first announcement of each kind counts.

    `world_size` is that of the attempt that announced the global batch.
    """

    announcement: Announcement = NOTHING_ANNOUNCED
    world_size: int = 0

    def after(self, later: Announcement, world_size: int) -> _Known:
        """This record after an attempt with `world_size` ranks has announced `later`."""
        known = self.announcement
        has_batch = known.global_batch_size is not None
        merged = Announcement(
            known.resume_args or later.resume_args,
            known.global_batch_size if has_batch else later.global_batch_size,
            later.max_ranks if known.max_ranks is None else known.max_ranks,
            known.run_dir or later.run_dir,
        )
        return _Known(merged, self.world_size if has_batch else world_size)


def run(
    options: LaunchOptions, plan: Plan, started_at: float, exchange: Exchange | None = None
) -> Outcome:
    """Run the job, and restart it after each failure, at most `--max-restarts` times, and to grow.

    Args:
        exchange: of the function that every rank runs, if the job is no script.

    Raises:
        UserError, JobFailed: the first attempt cannot be started. That of a later one is its failure.
    """
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
        self._exchange = exchange
        self._signals = signals
        self._planner = Planner(options, started_at, plan)
        self._began_at = time.monotonic() - (time.time() - started_at)
        self._run_id = os.urandom(8).hex()
        self._known = _Known()
        self._restarts = 0
        self._failures = 0  # restarts that count
        self._in_a_row = 0  # failures without a step between them: the pause grows only for these
        self._before_growth: Plan | None = None  # until the attempt on more hosts makes a step
        self._is_saved = False  # whether the stop before that attempt has saved
        self._looks_for_hosts = options.when.grow_s is not None

    def run(self) -> Outcome:
        outcome = self._attempt()
        while planned := self._plan_next(outcome):
            outcome = planned if isinstance(planned, Outcome) else self._attempt()
        return replace(outcome, announcement=self._known.announcement)

    def _attempt(self) -> Outcome:
        """Run the latest plan.

        Raises:
            UserError, JobFailed: the first attempt cannot be started.
        """
        plan, when = self._planner.plan, self._options.when
        settings = {
            RUN_ID: self._run_id,
            RESTART_COUNT: str(self._restarts),
            MAX_RESTARTS: str(when.max_restarts),
        }
        request = _resuming(_with_settings(plan.request, settings), self._known)
        limits = _limits(self._options, plan.starter, self._began_at)
        shown = _shown(self._options, request)
        try:
            with self._watch() as watch:
                outcome = attempt(
                    plan.starter, request, limits, self._signals, shown, self._exchange, watch
                )
        except (UserError, JobFailed) as error:
            if not self._restarts:
                raise
            outcome = Outcome(FAILED, str(error))  # the job has started before, and may again
        self._known = self._known.after(outcome.announcement, request.world_size)
        if outcome.made_steps:
            self._before_growth = None
        is_interrupted = outcome.code == INTERRUPTED and not outcome.is_at_once
        if self._before_growth and self._is_saved and is_interrupted:
            return _interrupted(is_saved=True)
        return outcome

    @contextmanager
    def _watch(self) -> Iterator[HostWatch | None]:
        """The process that looks for hosts during an attempt, if the options request it."""
        if not self._looks_for_hosts or self._planner.plan.request.control_address is None:
            yield None
            return
        from mpiddp.launch.growth import WatchProcess  # few jobs need it

        with closing(WatchProcess(self._look)) as watch:
            yield watch

    def _look(self, max_ranks: int | None) -> Look:
        known = self._known.announcement.max_ranks
        return self._planner.look(max_ranks if known is None else known)

    def _plan_next(self, outcome: Outcome) -> Plan | Outcome | None:
        """The plan of the next attempt, None if there is none; an outcome if it cannot be planned."""
        if outcome.stop_was_requested or outcome.code in (DONE, INTERRUPTED):
            return None
        if outcome.grows:
            return self._grow(outcome)
        if self._before_growth and outcome.code in (FAILED, BAD_INPUT):
            return self._go_back(outcome, self._before_growth)
        if outcome.code == FAILED and self._failures < self._options.when.max_restarts:
            return self._restart(outcome)
        return None

    def _restart(self, outcome: Outcome) -> Plan | Outcome:
        """Plan a restart after a failure."""
        log.info(outcome.sentence)
        self._restarts += 1
        self._failures += 1
        self._in_a_row = 1 if outcome.made_steps else self._in_a_row + 1
        pause_s = min(FIRST_PAUSE_S * 2 ** min(self._in_a_row - 1, 10), LONGEST_PAUSE_S)
        signals = self._signals
        if stop_is_requested(signals, within_s=pause_s) or _is_interrupted_without_folder(signals):
            return _interrupted(is_saved=False)
        planned: Plan | Outcome
        try:
            planned = self._planner.next(self._known.announcement.max_ranks)
        except (UserError, JobFailed) as error:  # a host may be usable after the next pause
            planned = Outcome(FAILED, str(error))
        if stop_is_requested(signals, within_s=0.0):
            return _interrupted(is_saved=False)
        if isinstance(planned, Plan):
            count = f"restart {self._failures} of {self._options.when.max_restarts}"
            self._log_restart(planned.request, f" ({count})")
        return planned

    def _grow(self, outcome: Outcome) -> Plan | Outcome:
        """Plan a restart on the hosts that can join. It does not count, nor does a failure of the stop."""
        self._restarts += 1
        self._is_saved = outcome.code == STOPPED
        if not self._is_saved:
            log.info(f"{outcome.sentence} From now on, hosts join only at a restart.".lstrip())
            self._looks_for_hosts = False
        if self._must_stop() or _is_interrupted_without_folder(self._signals):
            return _interrupted(is_saved=self._is_saved)
        before = self._planner.plan
        try:
            self._planner.next(self._known.announcement.max_ranks)
        except (UserError, JobFailed) as error:  # the hosts of before have just worked
            log.info(str(error))
        if self._must_stop():
            return _interrupted(is_saved=self._is_saved)
        plan = self._planner.plan
        is_larger = plan.request.world_size > before.request.world_size
        self._before_growth = before if is_larger else None
        self._log_restart(plan.request)
        return plan

    def _go_back(self, outcome: Outcome, plan: Plan) -> Plan | Outcome:
        """Return to the hosts before the growth, with which the job did not start. It does not count."""
        self._restarts += 1
        self._before_growth = None
        if outcome.sentence:
            log.info(outcome.sentence)
        if self._must_stop():
            return _interrupted(is_saved=self._is_saved)
        if avoided := self._planner.go_back(plan):
            them, lines = ("it", "its line") if len(avoided) == 1 else ("them", "their lines")
            log.info(
                f"leaving out {all_of(avoided)} for {duration(self._planner.avoided_s)}, or until {lines} in "
                f"the list of hosts change{'s' * (len(avoided) == 1)}: the job did not start with {them}."
            )
        self._log_restart(plan.request)
        return plan

    def _must_stop(self) -> bool:
        """Whether the user has requested a stop, by a signal or by --stop-after."""
        left_s = _stop_after_s(self._options, self._began_at)
        return stop_is_requested(self._signals, within_s=0.0) or left_s == 0.0

    def _log_restart(self, request: Request, count: str = "") -> None:
        known = self._known
        log.info(f"restarting on {all_of([node.name for node in request.nodes])}{count}.")
        global_batch_size = known.announcement.global_batch_size
        if global_batch_size is not None and request.world_size != known.world_size:
            log.info(
                f"{request.world_size} ranks instead of {known.world_size}; the global batch stays at "
                f"{global_batch_size}."
            )


def _interrupted(*, is_saved: bool) -> Outcome:
    """The outcome of a job whose user requests a stop before a restart.

    Args:
        is_saved: it has lost no step, because it stopped after a checkpoint and has made none since.
    """
    if is_saved:
        return Outcome(STOPPED, "stopped on request.")
    return Outcome(INTERRUPTED, "interrupted before a restart.")


def _is_interrupted_without_folder(signals: SignalQueue) -> bool:
    """Wait while the working folder's file system is away. Whether a stop is requested meanwhile."""
    deadline = time.monotonic() + FOLDER_AWAY_S
    says_so = False
    while time.monotonic() < deadline:
        try:
            Path.cwd().stat()
            return False
        except OSError as error:
            if not says_so:
                says_so = True
                log.info(f"the working folder is away ({error.strerror}); waiting for it …")
        if stop_is_requested(signals, within_s=FIRST_PAUSE_S):
            return True
    return False


def _with_settings(request: Request, settings: dict[str, str]) -> Request:
    return replace(
        request,
        settings={**request.settings, **settings},
        exports=tuple(sorted({*request.exports, *settings})),
    )


def _resuming(request: Request, known: _Known) -> Request:
    """The request with the job's announcement for its restarts."""
    settings: dict[str, str] = {}
    global_batch_size = known.announcement.global_batch_size
    if global_batch_size is not None:
        batch = {"global_batch_size": global_batch_size, "world_size": known.world_size}
        settings[ANNOUNCED] = json.dumps(batch)
    if known.announcement.run_dir:
        settings[RUN_DIR] = known.announcement.run_dir
    job = (*request.job, *known.announcement.resume_args)
    return replace(_with_settings(request, settings), job=job)


def _shown(options: LaunchOptions, request: Request) -> Shown:
    output = options.output
    return Shown(output.log_ranks, output.has_prefix(request.world_size))


def _limits(options: LaunchOptions, starter: RankStarter, began_at: float) -> Limits:
    """The limits of one attempt. The clock of --stop-after starts at `began_at` (time.monotonic())."""
    when = options.when
    # srun may have to wait for other job steps to end.
    starts_in_s = max(START_TIMEOUT_S, 2 * (options.how.timeout_s or 0))
    start_timeout_s = None if starter.kind == "slurm" else starts_in_s
    return Limits(
        grace_s=when.grace_s,
        save_grace_s=when.save_grace_s,
        start_timeout_s=start_timeout_s,
        stop_after_s=_stop_after_s(options, began_at),
        hang_timeout_s=when.hang_timeout_s,
        grow_s=when.grow_s,
    )


def _stop_after_s(options: LaunchOptions, began_at: float) -> float | None:
    """What is left of --stop-after, in seconds."""
    stop_after_s = options.when.stop_after_s
    if stop_after_s is None:
        return None
    return max(0.0, began_at + stop_after_s - time.monotonic())
