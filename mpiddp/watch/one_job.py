"""`mpiddp stacks`, `stop`, `logs` and `wait`: one job of this user, from another terminal."""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress

from mpiddp.arguments import Option, whole
from mpiddp.errors import DONE, FAILED, INTERRUPTED, UserError, print_error
from mpiddp.hosts.processes import catches, opened
from mpiddp.protocol.channel import VIEW_STACKS
from mpiddp.text import counted, escaped
from mpiddp.watch.detached import DetachedJob, read_log
from mpiddp.watch.running_jobs import find_detached, find_job, job_parser

_EVERY_S = 0.2  # `mpiddp logs -f` looks for more so often
_OR_LATEST = "the only one that runs, or else the latest"


def stacks(argv: list[str]) -> int:
    """Run `mpiddp stacks ARGV`. Raises UserError for bad usage, no such job or rank, or no answer."""
    purpose = "Print the current source line of each rank. The job goes on."
    of_rank = Option(
        "--rank", value="N", parse=whole(0), help="also print the Python stacks of this rank"
    )
    options = job_parser("stacks", purpose, of_rank).parse_args(argv)
    job, rank = find_job(options.job), options.rank
    count = len(job.facts.get("ranks", []))
    if rank is not None and rank >= count > 0:
        raise UserError(
            f"--rank {rank}: there is no such rank; job {job.title} has {counted(count, 'rank')}."
        )
    facts = job.ask(VIEW_STACKS)
    text = str(facts["sentence"])
    if rank is not None:
        stack = facts["stacks"].get(str(rank), f"rank {rank} has sent no stack.")
        text += f"\n\n{stack}"
    print(escaped(text, keep="\n").rstrip())
    return DONE


def stop(argv: list[str]) -> int:
    """Run `mpiddp stop ARGV`. It does not wait for the end of the job. Raises UserError for no such job."""
    purpose = (
        "Stop a job: its ranks save, if its script can, and it ends. A second request kills it."
    )
    parser = job_parser("stop", purpose, default="none; the only one that runs is named")
    name = parser.parse_args(argv).job
    job = find_job(name)
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


def logs(argv: list[str]) -> int:
    """Run `mpiddp logs ARGV`. Raises UserError for bad usage, or no such job."""
    purpose = "Print the output of a job that was started with --detach."
    follow = Option("-f", "--follow", help="go on until the job ends, or Ctrl-C")
    options = job_parser("logs", purpose, follow, default=_OR_LATEST).parse_args(argv)
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
    purpose = (
        "Wait until a job that was started with --detach has ended. The exit code is the job's."
    )
    job = find_detached(job_parser("wait", purpose, default=_OR_LATEST).parse_args(argv).job)
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
