"""`mpiddp launch`: start a script on every host of a hostfile.

Reads the hosts, composes one command for the installed MPI, supervises it, and returns the exit code.

    mpiddp launch --hostfile hostfiles/two_nodes --dry-run train.py --epochs 3
"""

from __future__ import annotations

import os
import time

from mpiddp.launch import log
from mpiddp.launch.options import parse_options
from mpiddp.launch.supervise.output import open_closed_streams
from mpiddp.launch.usable_hosts import refuse_inside_a_rank
from mpiddp.world import leave_enclosing_job


def main(argv: list[str]) -> int:
    """Launch the job of `argv`. The exit code: 0 done, 1 the job failed, 2 its ranks refused their
    input, 75 stopped on request after a checkpoint, 130 interrupted.

    Raises:
        UserError: bad input, found before anything started.
    """
    started_at = time.time()
    open_closed_streams()
    is_nested = leave_enclosing_job(os.environ)
    options = parse_options(argv)
    if not is_nested:
        refuse_inside_a_rank(options.where, os.environ)
    # Imported here, so that --help and a wrong option answer at once.
    from mpiddp.launch.plan import make_plan
    from mpiddp.launch.starters.compose import compose
    from mpiddp.launch.starters.environment import (
        fill_in_hint,
        left_out_hint,
        shell_line,
        without_values,
    )

    plan = make_plan(options, started_at, os.environ, may_wait=True)
    options.output.check_ranks(plan.request.world_size)
    if hint := left_out_hint(options.how.exports, os.environ):
        log.info(hint)
    if options.dry_run:
        print(compose(plan.starter, plan.request).explained(plan.request))
        if hint := fill_in_hint(options.how.all_exports, os.environ):
            log.info(hint)
        return 0
    from mpiddp.launch.restarts import run  # a dry run needs no sockets and secrets

    outcome = run(options, plan, started_at)
    if outcome.sentence:
        log.info(outcome.sentence)
    if outcome.resumes:
        exports, job = options.how.exports, argv[len(argv) - len(options.job.command) :]
        own = without_values(argv[: len(argv) - len(job)], exports, os.environ)
        again = ["mpiddp", "launch", *own, *job, *outcome.announcement.resume_args]
        log.info(f"to resume: {shell_line(again)}")
        if hint := fill_in_hint(exports, os.environ):
            log.info(hint)
    return outcome.code
