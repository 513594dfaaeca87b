"""`mpiddp stacks`: the line in which each rank of a job is. `mpiddp stop`: stop a job, as Ctrl-C does."""

from __future__ import annotations

import signal
from contextlib import suppress

from mpiddp.arguments import Option, whole
from mpiddp.errors import DONE, UserError
from mpiddp.hosts.processes import catches, opened
from mpiddp.protocol.channel import VIEW_STACKS
from mpiddp.text import counted, escaped
from mpiddp.watch.running_jobs import HasEnded, find_job, job_parser


def stacks(argv: list[str]) -> int:
    """Run `mpiddp stacks ARGV`. Raises UserError for bad usage, no such job or rank, or no answer."""
    purpose = "Print the current source line of each rank. The job goes on."
    of_rank = Option("--rank", value="N", parse=whole(0), help="also print the Python stacks of this rank")
    options = job_parser("stacks", purpose, of_rank).parse_args(argv)
    job, rank = find_job(options.job), options.rank
    count = len(job.facts.get("ranks", []))
    if rank is not None and rank >= count > 0:
        raise UserError(f"--rank {rank}: there is no such rank; job {job.title} has {counted(count, 'rank')}.")
    facts = job.ask(VIEW_STACKS)
    text = str(facts["sentence"])
    if rank is not None:
        stack = facts["stacks"].get(str(rank), f"rank {rank} has sent no stack.")
        text += f"\n\n{stack}"
    print(escaped(text, keep="\n").rstrip())
    return DONE


def stop(argv: list[str]) -> int:
    """Run `mpiddp stop ARGV`. It does not wait for the end of the job. Raises UserError for no such job."""
    purpose = "Stop a job: its ranks save, if its script can, and it ends. A second request kills it."
    parser = job_parser("stop", purpose, default="none; the only one that runs is named")
    name = parser.parse_args(argv).job
    try:
        job = find_job(name)
    except HasEnded as ended:
        print(ended)
        return DONE
    if name is None:  # a stop ends hours of work, and the only job may be another terminal's
        raise UserError(f"mpiddp stop: job {job.title} runs.", fix=f"mpiddp stop {job.pid}")
    if not job.pid:
        raise UserError(f"job {job.title} runs in another container.", fix="stop it there")
    with suppress(ProcessLookupError), opened(job.pid) as send:
        job.connected().close()  # raises if the job has ended, because its pid may be another's then
        send(signal.SIGCONT)  # a suspended launcher (Ctrl-Z) would not handle a signal
        # In the background of a shell, a launcher and its ranks ignore Ctrl-C.
        send(signal.SIGINT if catches(job.pid, signal.SIGINT) else signal.SIGTERM)
        print(f"job {job.title} is requested to stop.")
        return DONE
    raise job.ended_meanwhile
