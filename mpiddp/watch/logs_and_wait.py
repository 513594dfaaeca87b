"""`mpiddp logs`: what a job of `mpiddp launch --detach` prints. `mpiddp wait`: wait until it ends."""

from __future__ import annotations

import os
import select

from mpiddp.errors import DONE, FAILED, INTERRUPTED, UserError
from mpiddp.text import listed, shown
from mpiddp.watch.detached import DetachedJob, detached_jobs, read_log
from mpiddp.watch.jobs import job_parser, running_jobs

_EVERY_S = 0.2
_DEFAULT = "the latest job"


def logs(argv: list[str]) -> int:
    """Run `mpiddp logs ARGV`. Raises UserError for bad usage, or no such job."""
    purpose = "Print the output of a job that was started with --detach."
    parser = job_parser("logs", purpose, _DEFAULT)
    parser.add_argument(
        "-f", "--follow", action="store_true", help="go on until the job ends, or Ctrl-C"
    )
    options = parser.parse_args(argv)
    job = _find(options.job)
    reader = select.poll()
    reader.register(1, 0)  # its end, as of `| head`, is always reported
    try:
        for piece in read_log(job, follows=options.follow):
            if piece is None and reader.poll(1000 * _EVERY_S):
                break
            while piece:
                piece = piece[os.write(1, piece) :]
    except KeyboardInterrupt:
        _say_it_goes_on(job)
    return DONE


def wait(argv: list[str]) -> int:
    """Run `mpiddp wait ARGV`. The exit code is the job's. Raises UserError for bad usage, or no such job."""
    purpose = (
        "Wait until a job that was started with --detach has ended. The exit code is the job's."
    )
    job = _find(job_parser("wait", purpose, _DEFAULT).parse_args(argv).job)
    try:
        job.wait()
    except KeyboardInterrupt:
        _say_it_goes_on(job)
        return INTERRUPTED
    print(job.ending)
    code = job.report().get("exit_code")
    return FAILED if code is None else int(code)


def _say_it_goes_on(job: DetachedJob) -> None:
    if job.is_running:
        print(f"\njob {job.name} goes on. To stop it: mpiddp stop {job.name}")


def _find(name: str | None) -> DetachedJob:
    """The job of this name, or the latest."""
    jobs = detached_jobs()
    for job in jobs:
        if name in (None, job.name):
            return job
    for attached in running_jobs():
        if name in (attached.name, str(attached.pid)):
            raise UserError(
                f"job {attached.title} was started without --detach: its output is where it was started."
            )
    known = f" There are: {listed([job.name for job in jobs])}." if jobs else ""
    called = f" called {shown(name)}" if name is not None and jobs else ""
    raise UserError(f"no job{called} was started with mpiddp launch --detach.{known}")
