"""`mpiddp ps`: the jobs of this user on this machine."""

from __future__ import annotations

import sys

from mpiddp.arguments import OneSentenceParser
from mpiddp.protocol.viewers import taken
from mpiddp.text import align_columns, duration, escaped
from mpiddp.watch.jobs import Job, hosts_of, rate, running_jobs

_HEAD = ("PID", "NAME", "HOSTS", "RANKS", "STEP", "RATE", "STATE", "AGE")


def main(argv: list[str]) -> int:
    """Run `mpiddp ps ARGV`. Raises UserError for bad usage."""
    OneSentenceParser(
        prog="mpiddp ps",
        description="List your jobs whose mpiddp launch runs on this machine.",
        allow_abbrev=False,
    ).parse_args(argv)
    if why := taken():
        print(f"mpiddp: {why}", file=sys.stderr)
    jobs = running_jobs()
    print(table(jobs) if jobs else "no job of yours runs on this machine.")
    return 0


def table(jobs: list[Job]) -> str:
    """A line for each job."""
    return align_columns([_HEAD, *map(_row, jobs)], right=(0, 3, 4, 5))


def _row(job: Job) -> list[str]:
    facts, pid = job.facts, str(job.pid or "-")
    if not facts:
        return [pid, "-", "-", "-", "-", "-", "no answer", "-"]
    hosts = hosts_of(facts)
    more = f" +{len(hosts) - 2}" if len(hosts) > 2 else ""
    step = "-" if facts["step"] is None else str(facts["step"])
    places = [facts["name"], ",".join(hosts[:2]) + more, str(len(facts["ranks"]))]
    state = [step, rate(facts["rate"]), facts["phase"], duration(facts["age_s"])]
    return [pid, *map(escaped, [*places, *state])]
