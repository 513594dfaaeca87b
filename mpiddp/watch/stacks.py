"""`mpiddp stacks`: in which line each rank of a job is, equal ones together."""

from __future__ import annotations

import re

from mpiddp.arguments import OneSentenceParser, whole
from mpiddp.errors import UserError
from mpiddp.text import escaped
from mpiddp.watch.jobs import Job, find_job

# The frames of what runs a script, which stand above the script's own.
_ABOVE_SCRIPT = re.compile(
    r'(?:(?<=:\n)|\A)(?:  File "(?:<frozen |<string>|[^"]*/(?:mpiddp/|runpy\.py))[^\n]*\n(?:    [^\n]*\n)*)+'
)


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
    """Where all ranks are, and the Python stacks of `rank`.

    Raises:
        UserError: no answer, or the job has no such rank.
    """
    count = len(job.facts.get("ranks", []))
    if rank is not None and rank >= count > 0:
        has = f"ranks 0 to {count - 1}" if count > 1 else "rank 0 only"
        raise UserError(f"--rank {rank}: there is no such rank; job {job.title} has {has}.")
    facts = job.stacks()
    text = str(facts["sentence"])
    if rank is not None:
        stacks = facts["stacks"].get(str(rank), f"rank {rank} has sent no stack.")
        text += f"\n\n{_ABOVE_SCRIPT.sub('', stacks)}"
    return escaped(text, keep="\n").rstrip()
