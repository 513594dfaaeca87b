"""Restart a failed job from its newest checkpoint, on the hosts that are usable then.

Every restart begins with a preflight of all hosts, like a start. A broken host is left out if the options
allow it, and takes part again once it answers. A restart receives the job's announcement (see
`mpiddp.runtime.announcement`).
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

from mpiddp.errors import FAILED, INTERRUPTED, UserError
from mpiddp.launch import log
from mpiddp.launch.options import LaunchOptions
from mpiddp.launch.plan import Plan, make_plan
from mpiddp.launch.starters.command import Request
from mpiddp.launch.starters.detect import RankStarter
from mpiddp.launch.supervise.attempt import Outcome, attempt
from mpiddp.launch.supervise.exchange import Exchange
from mpiddp.launch.supervise.job_state import NOTHING_ANNOUNCED, Announcement
from mpiddp.launch.supervise.output import Shown
from mpiddp.launch.supervise.signals import SignalQueue, queued_signals, stop_is_requested
from mpiddp.launch.supervise.supervisor import Limits
from mpiddp.protocol import ANNOUNCED, MAX_RESTARTS, RESTART_COUNT, RUN_DIR, RUN_ID
from mpiddp.text import all_of

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
    """Run the job, and restart it after each failure, at most `--max-restarts` times.

    Args:
        exchange: of the function that every rank runs, if the job is no script.
    """
    with queued_signals() as signals:
        return _run(options, plan, started_at, signals, exchange)


def _run(
    options: LaunchOptions,
    plan: Plan,
    started_at: float,
    signals: SignalQueue,
    exchange: Exchange | None,
) -> Outcome:
    began_at = time.monotonic() - (time.time() - started_at)
    known = _Known()
    in_a_row = 0  # failures without a step between them: the pause grows only for these
    run_id = os.urandom(8).hex()
    first = _numbered(plan.request, run_id, 0, options.when.max_restarts)
    limits = _limits(options, plan.starter, began_at)
    outcome = attempt(plan.starter, first, limits, signals, _shown(options, first), exchange)
    for restart in range(1, options.when.max_restarts + 1):
        if outcome.code != FAILED or outcome.stop_was_requested:
            break
        known = known.after(outcome.announcement, plan.request.world_size)
        log.info(outcome.sentence)
        in_a_row = 1 if outcome.made_steps else in_a_row + 1
        pause_s = min(FIRST_PAUSE_S * 2 ** min(in_a_row - 1, 10), LONGEST_PAUSE_S)
        planned = _plan_restart(options, started_at, known, signals, pause_s)
        if isinstance(planned, Outcome):
            outcome = planned
            continue
        plan = planned
        _log_restart(plan.request, known, restart, options.when.max_restarts)
        limits = _limits(options, plan.starter, began_at)
        request = _numbered(plan.request, run_id, restart, options.when.max_restarts)
        resuming, shown = _resuming(request, known), _shown(options, request)
        outcome = attempt(plan.starter, resuming, limits, signals, shown, exchange)
    known = known.after(outcome.announcement, plan.request.world_size)
    return replace(outcome, announcement=known.announcement)


def _plan_restart(
    options: LaunchOptions,
    started_at: float,
    known: _Known,
    signals: SignalQueue,
    pause_s: float,
) -> Plan | Outcome:
    """The plan for the hosts that are usable after the pause; an outcome if no attempt can start."""
    interrupted = Outcome(INTERRUPTED, "interrupted before a restart.")
    if stop_is_requested(signals, within_s=pause_s) or _is_interrupted_without_folder(signals):
        return interrupted
    planned: Plan | Outcome
    try:
        max_ranks = known.announcement.max_ranks
        planned = make_plan(options, started_at, os.environ, max_ranks=max_ranks)
    except UserError as error:  # a host may be usable after the next pause
        planned = Outcome(FAILED, str(error))
    return interrupted if stop_is_requested(signals, within_s=0.0) else planned


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


def _log_restart(request: Request, known: _Known, restart: int, max_restarts: int) -> None:
    hosts = all_of([node.name for node in request.nodes])
    log.info(f"restarting on {hosts} (restart {restart} of {max_restarts}).")
    global_batch_size = known.announcement.global_batch_size
    if global_batch_size is not None and request.world_size != known.world_size:
        log.info(
            f"{request.world_size} ranks instead of {known.world_size}; the global batch stays at "
            f"{global_batch_size}."
        )


def _numbered(request: Request, run_id: str, restart: int, max_restarts: int) -> Request:
    """The request with the run's id and the number of this restart."""
    return _with_settings(
        request,
        {RUN_ID: run_id, RESTART_COUNT: str(restart), MAX_RESTARTS: str(max_restarts)},
    )


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
    stop_after_s = when.stop_after_s
    if stop_after_s is not None:
        stop_after_s = max(0.0, began_at + stop_after_s - time.monotonic())
    # srun may have to wait for other job steps to end.
    starts_in_s = max(START_TIMEOUT_S, 2 * (options.how.timeout_s or 0))
    start_timeout_s = None if starter.kind == "slurm" else starts_in_s
    return Limits(
        when.grace_s, when.save_grace_s, start_timeout_s, stop_after_s, when.hang_timeout_s
    )
