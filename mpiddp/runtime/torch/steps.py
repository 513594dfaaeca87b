"""The steps of a script: `mpiddp.should_stop`, `mpiddp.progress`."""

from __future__ import annotations

import operator

from mpiddp.protocol.messages import LARGEST_WHOLE
from mpiddp.runtime.job.session import script_session


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


def progress(step: int, total: int | None = None, **values: object) -> None:
    """Tell `mpiddp launch` how far the training is, for the status on its terminal and `mpiddp top`.

    Without it, the launcher counts the optimizer's steps, or the calls of `should_stop`. Call it on every
    rank, in every step: it takes microseconds, and at most two messages go out in a second.

        mpiddp.progress(step, total_steps, loss=loss.item(), lr=lr)

    Args:
        step: the step that has been made, from 1.
        total: the number of steps of the whole training.
        values: numbers and short texts, by name. Others are left out. Rank 0's are shown.

    Raises:
        TypeError, ValueError: a step that is no whole number, or a negative one.
    """
    if not 0 <= (step := operator.index(step)) <= LARGEST_WHOLE:
        raise ValueError(f"mpiddp.progress: step: expected 0 or more, not {step}")
    session = script_session()
    session.show(values if total is None else {**values, "total": total})
    session.progress(step)
