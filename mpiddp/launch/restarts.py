"""A job that fails is started again, from its newest checkpoint, on the hosts that are there then.

Every restart begins like a start, with a look at all hosts: one that is broken is left out if the
user can do without it, and is back as soon as it answers again.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from mpiddp.errors import FAILED, INTERRUPTED, UserError
from mpiddp.launch.plan import make_request
from mpiddp.launch.starters.command import Request
from mpiddp.launch.starters.detect import RankStarter
from mpiddp.launch.supervise.attempt import Outcome, attempt
from mpiddp.launch.supervise.job_state import NOTHING_ANNOUNCED, Announcement
from mpiddp.launch.supervise.signals import is_asked_to_stop, signals_on_socket
from mpiddp.launch.supervise.supervisor import Limits
from mpiddp.protocol import ANNOUNCED
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


@dataclass(frozen=True)
class _Announced:
    """What the attempts have announced so far: the first of each kind stands.

    `world_size` is that of the attempt that announced the global batch.
    """

    announcement: Announcement = NOTHING_ANNOUNCED
    world_size: int = 0

    def after(self, later: Announcement, world_size: int) -> _Announced:
        """The same, once an attempt with `world_size` ranks has announced `later`."""
        known = self.announcement
        has_batch = known.global_batch_size is not None
        merged = Announcement(
            known.resume_args or later.resume_args,
            known.global_batch_size if has_batch else later.global_batch_size,
            known.max_ranks if known.max_ranks is not None else later.max_ranks,
        )
        return _Announced(merged, self.world_size if has_batch else world_size)

    def settings(self) -> dict[str, str]:
        """The environment variable that hands it to the ranks of a restart."""
        if self.announcement.global_batch_size is None:
            return {}
        return {
            ANNOUNCED: json.dumps(
                {
                    "global_batch_size": self.announcement.global_batch_size,
                    "world_size": self.world_size,
                }
            )
        }


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
    known = _Announced().after(outcome.announcement, request.world_size)
    in_a_row = 0  # failures with no step between them: a job that gets on waits no longer each time
    for restart in range(1, options.max_restarts + 1):
        if outcome.code != FAILED or outcome.was_to_stop:
            break
        say(outcome.sentence)
        in_a_row = 1 if outcome.made_steps else in_a_row + 1
        pause_s = min(FIRST_PAUSE_S * 2 ** min(in_a_row - 1, 10), LONGEST_PAUSE_S)
        if is_asked_to_stop(signals, within_s=pause_s):
            outcome = _BETWEEN_STARTS
            break
        refusal = ""
        try:
            starter, request = make_request(
                options, started_at, os.environ, say, max_ranks=known.announcement.max_ranks
            )
        except UserError as error:  # a host may need longer than this pause
            refusal = str(error)
        if is_asked_to_stop(signals, within_s=0.0):
            outcome = _BETWEEN_STARTS
            break
        if refusal:
            outcome = Outcome(FAILED, refusal)
            continue
        hosts = all_of([node.name for node in request.nodes])
        say(f"restarting on {hosts} (restart {restart} of {options.max_restarts}).")
        global_batch_size = known.announcement.global_batch_size
        if global_batch_size is not None and request.world_size != known.world_size:
            say(
                f"{request.world_size} ranks instead of {known.world_size}: the global batch stays "
                f"{global_batch_size}."
            )
        request = _resuming(request, known)
        outcome = attempt(starter, request, _limits(options, starter, begun), say, signals)
        known = known.after(outcome.announcement, request.world_size)
    return replace(outcome, announcement=known.announcement)


_BETWEEN_STARTS = Outcome(INTERRUPTED, "interrupted between two starts.")


def _resuming(request: Request, known: _Announced) -> Request:
    """The request with what the job has announced for its restarts."""
    settings = known.settings()
    return replace(
        request,
        job=(*request.job, *known.announcement.resume_args),
        settings={**request.settings, **settings},
        exports=tuple(sorted({*request.exports, *settings})),
    )


def _limits(options: argparse.Namespace, starter: RankStarter, begun: float) -> Limits:
    """The clock of --stop-after runs on over restarts, from `begun` in time.monotonic()'s seconds."""
    stop_after_s = options.stop_after
    if stop_after_s is not None:
        stop_after_s = max(0.0, begun + stop_after_s - time.monotonic())
    # srun may have to wait for others' steps to end.
    starts_in = max(START_TIMEOUT_S, 2 * (options.timeout or 0))
    start_timeout_s = None if starter.kind == "slurm" else starts_in
    return Limits(options.grace, start_timeout_s, stop_after_s, options.hang_timeout)
