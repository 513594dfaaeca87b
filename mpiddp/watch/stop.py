"""`mpiddp stop`: stop a job, as Ctrl-C in its terminal or SIGTERM to its launcher does."""

from __future__ import annotations

import signal
import sys
from contextlib import suppress

from mpiddp.arguments import OneSentenceParser
from mpiddp.errors import UserError
from mpiddp.hosts.processes import opened
from mpiddp.watch.jobs import Job, find_job


def main(argv: list[str]) -> int:
    """Run `mpiddp stop ARGV`. It does not wait for the end of the job.

    Raises:
        UserError: bad usage, no such job, one in another container, or no name and nobody to ask.
    """
    parser = OneSentenceParser(
        prog="mpiddp stop",
        description="Stop a job: its ranks save, if its script can, and it ends. A second request kills it.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "job",
        nargs="?",
        metavar="JOB",
        help="pid or name (default: the only job, once you confirm)",
    )
    name = parser.parse_args(argv).job
    job = find_job(name)
    if name is None and not _confirmed(job):
        return 0
    if not job.pid:
        raise UserError(f"job {job.title} runs in another container. Stop it there.")
    with suppress(ProcessLookupError), opened(job.pid) as send:
        if job.is_alive:  # else another process may have its pid by now
            send(signal.SIGTERM)
            print(f"job {job.title} is requested to stop.")
            return 0
    raise job.gone()


def _confirmed(job: Job) -> bool:
    """Ask on the terminal. A stop ends hours of work, and the only job may be another terminal's.

    Raises:
        UserError: there is no terminal.
    """
    if not sys.stdin.isatty():
        raise UserError(f"name the job that is to stop: mpiddp stop {job.pid}")
    print(f"stop job {job.title}? [y/N] ", end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
