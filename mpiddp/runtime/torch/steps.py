"""The steps of a script: `mpiddp.should_stop`, `mpiddp.progress`, `mpiddp.together`."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping

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
    if coordinator is None:
        raise RuntimeError("mpiddp.together: call mpiddp.process_group() or mpiddp.init() first.")
    return coordinator.all_or_none(timeout_s=timeout_s)


def progress(
    step: int,
    total: int | None = None,
    *,
    phases: Mapping[str, float] | None = None,
    **values: object,
) -> None:
    """Tell `mpiddp launch` how far the training is, for the status on its terminal and `mpiddp top`.

    Without it, the launcher counts the optimizer's steps, or the calls of `should_stop`. Call it on every
    rank, in every step: it takes microseconds, and at most two messages go out in a second.

        mpiddp.progress(step, total_steps, loss=loss.item(), lr=lr)

    Args:
        step: the step that has been made, from 1.
        total: the number of steps of the whole training.
        phases: the seconds that all steps so far have spent in "data", "forward", "backward", "waiting" for
            other ranks and "optimizer", and the number of these "steps": then stragglers are found exactly.
        values: numbers and short texts, by name. Others are left out. Rank 0's are shown.

    Raises:
        TypeError, ValueError: a step that is no whole number, or a negative one.
    """
    if not 0 <= (step := operator.index(step)) <= LARGEST_WHOLE:
        raise ValueError(f"mpiddp.progress: step: expected 0 or more, not {step}")
    reports = script_session().reports
    if phases is not None:
        reports.tell_phases(phases)
    reports.show(values if total is None else {**values, "total": total})
    reports.progress(step)
