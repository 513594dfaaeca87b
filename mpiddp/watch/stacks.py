"""`mpiddp stacks`: in which line each rank of a job is, equal ones together."""

from __future__ import annotations

from mpiddp.arguments import OneSentenceParser, whole
from mpiddp.text import escaped
from mpiddp.watch.jobs import Job, find_job


def main(argv: list[str]) -> int:
    """Run `mpiddp stacks ARGV`. Raises UserError for bad usage, no such job, or no answer."""
    parser = OneSentenceParser(
        prog="mpiddp stacks",
        description="Say in which line each rank of a job is, and who waits. The job goes on.",
        allow_abbrev=False,
    )
    parser.add_argument("job", nargs="?", metavar="JOB", help="pid or name (default: the only job)")
    parser.add_argument("--rank", type=whole(0), help="also print the Python stacks of this rank")
    options = parser.parse_args(argv)
    print(stacks_text(find_job(options.job), options.rank))
    return 0


def stacks_text(job: Job, rank: int | None) -> str:
    """Where all ranks are, and the Python stacks of `rank`. Raises UserError without an answer."""
    facts = job.stacks()
    text = str(facts["sentence"])
    if rank is not None:
        text += f"\n\n{facts['stacks'].get(str(rank), f'rank {rank} has sent no stack.')}"
    return escaped(text, keep="\n").rstrip()
