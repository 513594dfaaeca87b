"""A job that fails is started again, from its newest checkpoint, on the hosts that are there then.

Every restart begins like a start, with a look at all hosts: one that is broken is left out if the
user can do without it, and is back as soon as it answers again.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from mpiddp.errors import FAILED, INTERRUPTED, UserError
from mpiddp.launch.plan import make_request
from mpiddp.launch.starters.command import Request
from mpiddp.launch.starters.detect import RankStarter
from mpiddp.launch.supervise.attempt import Outcome, attempt
from mpiddp.launch.supervise.job_state import Batch
from mpiddp.launch.supervise.signals import is_asked_to_stop, signals_on_socket
from mpiddp.launch.supervise.supervisor import Limits
from mpiddp.text import all_of

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
START_TIMEOUT_S = 120.0  # until the first rank is there: all disks may be cold

Say = Callable[[str], None]


def run(
    options: argparse.Namespace, starter: RankStarter, request: Request, started_at: float, say: Say
) -> Outcome:
    """Run the job, and again after each failure, `options.max_restarts` times at most."""
    with signals_on_socket() as signals:
        return _run(options, starter, request, started_at, say, signals)


def _run(
    options: argparse.Namespace,
    starter: RankStarter,
    request: Request,
    started_at: float,
    say: Say,
    signals: socket.socket,
) -> Outcome:
    begun = time.monotonic() - (time.time() - started_at)
    outcome = attempt(starter, request, _limits(options, starter, begun), say, signals)
    resume, batch = outcome.resume, outcome.batch
    world_size = request.world_size  # of the attempt that has told its batch
    in_a_row = 0  # failures with no step between them: a job that gets on waits no longer each time
    for restart in range(1, options.max_restarts + 1):
        if outcome.code != FAILED or outcome.was_to_stop:
            break
        say(outcome.sentence)
        in_a_row = 1 if outcome.made_steps else in_a_row + 1
        pause_s = min(FIRST_PAUSE_S * 2 ** min(in_a_row - 1, 10), LONGEST_PAUSE_S)
        if is_asked_to_stop(signals, within_s=pause_s):
            return Outcome(INTERRUPTED, "interrupted between two starts.", resume, batch)
        try:
            most_ranks = max(1, batch.images // 2) if batch else None
            starter, request = make_request(
                options, started_at, os.environ, say, most_ranks=most_ranks
            )
        except UserError as error:  # a host may need longer than this pause
            if is_asked_to_stop(signals, within_s=0.0):
                return Outcome(INTERRUPTED, "interrupted between two starts.", resume, batch)
            outcome = Outcome(FAILED, str(error), resume, batch)
            continue
        if is_asked_to_stop(signals, within_s=0.0):
            return Outcome(INTERRUPTED, "interrupted between two starts.", resume, batch)
        hosts = all_of([node.name for node in request.nodes])
        say(f"restarting on {hosts} (restart {restart} of {options.max_restarts}).")
        job = [*request.job, *resume]
        if batch and request.world_size != world_size:
            job = _keeping_batch(job, batch, request.world_size)
            say(
                f"{request.world_size} ranks instead of {world_size}: the global batch stays "
                f"{batch.images}."
            )
        request = replace(request, job=tuple(job))
        outcome = attempt(starter, request, _limits(options, starter, begun), say, signals)
        resume = resume or outcome.resume
        if batch is None:
            batch, world_size = outcome.batch, request.world_size
    return replace(outcome, resume=resume)


def _limits(options: argparse.Namespace, starter: RankStarter, begun: float) -> Limits:
    """The clock of --stop-after runs on over restarts, from `begun` in time.monotonic()'s seconds."""
    stop_after_s = options.stop_after
    if stop_after_s is not None:
        stop_after_s = max(0.0, begun + stop_after_s - time.monotonic())
    # srun may have to wait for others' steps to end.
    starts_in = max(START_TIMEOUT_S, 2 * (options.timeout or 0))
    start_timeout_s = None if starter.kind == "slurm" else starts_in
    return Limits(options.grace, start_timeout_s, stop_after_s, options.hang_timeout)


def _keeping_batch(job: Sequence[str], batch: Batch, world_size: int) -> list[str]:
    """The words of `mpiddp train` for the same global batch on so many ranks.

    In as many backward passes as it takes for none to be larger than before: fewer ranks have the
    memory that they had.
    """
    kept: list[str] = []
    words = iter(job)
    for word in words:
        name, has_value, _ = word.replace("_", "-").partition("=")
        if name not in ("--batch-size", "--global-batch-size", "--grad-accum-steps"):
            kept.append(word)
        elif not has_value:
            next(words, None)
    passes = -(-batch.images // (batch.per_pass * world_size))
    passes = max(1, min(passes, batch.images // (2 * world_size)))  # BatchNorm wants two images
    dealt = [f"--global-batch-size={batch.images}", "--uneven", f"--grad-accum-steps={passes}"]
    return [*kept, *dealt]
