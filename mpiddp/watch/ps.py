"""`mpiddp ps`: the jobs of this user on this machine."""

from __future__ import annotations

import sys

from mpiddp.arguments import OneSentenceParser
from mpiddp.protocol.viewers import taken
from mpiddp.watch.jobs import running_jobs
from mpiddp.watch.table import jobs_table


def main(argv: list[str]) -> int:
    """Run `mpiddp ps ARGV`. Raises UserError for bad usage."""
    OneSentenceParser(
        prog="mpiddp ps",
        description="List your jobs whose mpiddp launch runs on this machine.",
        allow_abbrev=False,
    ).parse_args(argv)
    if why := taken():
        print(f"mpiddp: {why}", file=sys.stderr)
    jobs = [(job.pid, job.facts) for job in running_jobs()]
    print(jobs_table(jobs) if jobs else "no job of yours runs on this machine.")
    return 0
