"""`mpiddp logs`: the output of a job of `mpiddp launch --detach`. `mpiddp wait`: wait until it ends."""

from __future__ import annotations

import os
import select

from mpiddp.arguments import Option
from mpiddp.errors import DONE, FAILED, INTERRUPTED, print_error
from mpiddp.watch.detached import DetachedJob, read_log
from mpiddp.watch.running_jobs import find_detached, job_parser

_EVERY_S = 0.2
_DEFAULT = "the only one that runs, or else the latest"


def logs(argv: list[str]) -> int:
    """Run `mpiddp logs ARGV`. Raises UserError for bad usage, or no such job."""
    purpose = "Print the output of a job that was started with --detach."
    follow = Option("-f", "--follow", help="go on until the job ends, or Ctrl-C")
    options = job_parser("logs", purpose, follow, default=_DEFAULT).parse_args(argv)
    job = find_detached(options.job)
    reader = select.poll()
    reader.register(1, 0)  # poll always reports that a reader has gone, as in `| head`
    try:
        for piece in read_log(job, follows=options.follow):
            if piece is None and reader.poll(1000 * _EVERY_S):
                break
            while piece:
                piece = piece[os.write(1, piece) :]
    except KeyboardInterrupt:
        return _interrupted(job)
    return DONE


def wait(argv: list[str]) -> int:
    """Run `mpiddp wait ARGV`. The exit code is the job's. Raises UserError for bad usage, or no such job."""
    purpose = "Wait until a job that was started with --detach has ended. The exit code is the job's."
    job = find_detached(job_parser("wait", purpose, default=_DEFAULT).parse_args(argv).job)
    try:
        job.wait()
    except KeyboardInterrupt:
        return _interrupted(job)
    print(job.ending)
    code = job.report().get("exit_code")
    return FAILED if code is None else int(code)


def _interrupted(job: DetachedJob) -> int:
    if job.is_running:
        print_error(f"job {job.name} goes on. To stop it: mpiddp stop {job.name}")
    return INTERRUPTED
