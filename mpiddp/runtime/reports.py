"""What a script and its launcher say to each other: steps, a stop, a save, and how to restart.

    mpiddp.announce(resume_args=["--resume", "last"], global_batch_size=512, max_ranks=256)

The launcher knows no script's options. It appends `resume_args` to the command of a restart, and starts
at most `max_ranks` ranks. A restart with another number of ranks reads the global batch of the first
attempt from `announced()`, and decides itself how to divide it.
"""

from __future__ import annotations

import contextlib
import json
import operator
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mpiddp.protocol.channel import LARGEST_WHOLE, LINE_LIMIT, is_valid
from mpiddp.protocol.variables import ANNOUNCED
from mpiddp.runtime.in_image import refuse_lost
from mpiddp.runtime.job.progress import BY_SCRIPT
from mpiddp.runtime.job.session import current, script_session
from mpiddp.text import shown


@dataclass(frozen=True)
class Announced:
    """What an earlier attempt of this job announced, see `announced`.

    Attributes:
        global_batch_size: samples of one step over all ranks.
        world_size: number of ranks of that attempt.
    """

    global_batch_size: int
    world_size: int


def announce(
    *,
    resume_args: Sequence[str] = (),
    global_batch_size: int | None = None,
    max_ranks: int | None = None,
) -> None:
    """Send the launcher what a restart of this job needs. Without `mpiddp launch` this does nothing.

    Call it on every rank or on one rank, as soon as the values are known and before the first step. A
    later call replaces an earlier one; the arguments of the first attempt serve all restarts.

    Args:
        resume_args: arguments to append to the same command, so that it resumes where this job ends.
        global_batch_size: samples of one step over all ranks, which a restart keeps.
        max_ranks: the largest number of ranks that the job can use.

    Raises:
        TypeError: an argument that is not a string.
        ValueError: a number below 1, or an argument that no command can get, such as one with a NUL.
        UserError: an argument is a path that is lost with the container of `mpiddp launch --image`.
    """
    facts = {
        "resume_args": list(resume_args),
        "global_batch_size": global_batch_size,
        "max_ranks": max_ranks,
    }
    numbers = [number for number in (global_batch_size, max_ranks) if number is not None]
    is_right = is_valid("announce", facts) and min(numbers, default=1) > 0
    is_right &= b"\0" not in os.fsencode("".join(resume_args)) and not isinstance(resume_args, str)
    if not is_right or len(json.dumps(facts)) > LINE_LIMIT // 2:
        raise ValueError(
            f"mpiddp.announce: not the arguments of a command, or too large: {shown(str(facts))}"
        )
    session = script_session()  # it has to know of an error
    for text in resume_args:
        name, _, value = text.partition("=")
        path = value if name.startswith("-") and value else text
        if path.startswith("/"):
            refuse_lost(path)
    session.coordinator.tell_launcher("announce", **facts)


def announced() -> Announced | None:
    """The global batch that an earlier attempt of this job announced, for a restart with other ranks.

        before = mpiddp.announced()
        global_batch_size = before.global_batch_size if before else 512

    Returns:
        None in the first attempt, without `mpiddp launch`, or if no attempt announced a global batch.
    """
    text = current().env.get(ANNOUNCED)
    return Announced(**json.loads(text)) if text else None


@contextlib.contextmanager
def saving() -> Iterator[None]:
    """Within the body, this rank saves its work: after a request to stop, it has up to 10 minutes.

    After `should_stop()` has returned True, you need this no longer. Use it around a save that a stop may
    interrupt. Without `mpiddp launch` it does nothing.

        with mpiddp.saving():
            np.savez(path, **arrays)

    Bodies may be nested, and may run in several threads at once. `mpiddp.Checkpoints`,
    `torch.save`, safetensors and torch's DCP do this themselves.
    """
    progress = script_session().progress
    progress.count_saves(1)
    try:
        yield
    finally:
        progress.count_saves(-1)


def should_stop() -> bool:
    """Whether to save and leave now, because the job was requested to stop.

    Every rank must call this once in every step, at the same point of its loop. All ranks get True after
    the same step, and leave with `sys.exit(75)` or at the end of the script. A call takes microseconds.
    No rank waits for another, except in the one or two steps after a request.

        for step in range(steps):
            train_one_step()
            if mpiddp.should_stop():
                save()
                sys.exit(75)

    A request is Ctrl-C, SIGTERM or `--stop-after` of `mpiddp launch`, or SIGUSR1 under any launcher.

    Returns:
        True from the agreed step on, else False.

    Raises:
        UserError, JobFailed: a script within `mpiddp run -- COMMAND` cannot join the other ranks' scripts.
    """
    return script_session().stop.should_stop()


def together(*, timeout_s: float = 600.0) -> contextlib.AbstractContextManager[None]:
    """Run the body on every rank; it succeeds on all ranks, or all end. All ranks must call this.

        with mpiddp.process_group() as world, mpiddp.together():
            if not Path("data").is_dir():
                raise mpiddp.UserError("data is missing")

    If the body raises a `UserError` or a `JobFailed` on some rank, its sentence is printed once, and every
    rank exits with code 2 or 1. Without this, the other ranks would wait for it in their next collective.

    Args:
        timeout_s: how long to wait for a rank that is still in the body.

    Raises:
        RuntimeError: the ranks have not joined; call `process_group` or `init` first.
    """
    coordinator = script_session().coordinator
    if not coordinator.hostnames:
        raise RuntimeError("mpiddp.together: call mpiddp.process_group() or mpiddp.init() first.")
    return coordinator.all_or_none(timeout_s=timeout_s)


def progress(step: int, total: int | None = None, **values: object) -> None:
    """Tell `mpiddp launch` how far the training is, for the status on its terminal and `mpiddp top`.

    Without it, the launcher counts the optimizer's steps, or the calls of `should_stop`. Call it on every
    rank, in every step: it takes microseconds, and at most two messages go out in a second.

        mpiddp.progress(step, total_steps, loss=loss.item(), lr=lr)

    Args:
        step: the number of the step that has just ended, from 1.
        total: the number of steps of the whole training.
        values: numbers and short texts, by name. Others are left out. Rank 0's are shown.

    Raises:
        TypeError, ValueError: a step that is negative or not a whole number.
    """
    if not 0 <= (step := operator.index(step)) <= LARGEST_WHOLE:
        raise ValueError(f"mpiddp.progress: step: expected 0 or more, not {step}")
    session = script_session()
    session.progress.show(values if total is None else {**values, "total": total})
    session.progress.count(step, BY_SCRIPT)
