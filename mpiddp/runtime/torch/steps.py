"""The steps of a script: `mpiddp.should_stop`."""

from __future__ import annotations

from mpiddp.runtime.launcher.connected import script_session


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
    session = script_session()
    if session.is_unjoined_script:
        session.is_unjoined_script = False
        if session.coordinator is None:
            from mpiddp.runtime.start.join import join_steps  # as few scripts need

            join_steps(session)
    return session.stop.should_stop()
