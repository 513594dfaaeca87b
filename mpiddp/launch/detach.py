"""`mpiddp launch --detach`: go on in a process that no terminal ends, with a log of bounded size."""

from __future__ import annotations

import os
import threading
import time

from mpiddp.launch import log
from mpiddp.watch.detached import LOG_LIMIT, DetachedJob, new_job

_CHECK_S = 1.0


def detach(beginning: str) -> tuple[DetachedJob, bool]:
    """The job, and whether this is its own process: the one that was called prints its name, and ends.

    What both print from now on goes to their own places: the job's process has its log as stdout and stderr.
    """
    job, lock = new_job(beginning)
    output = job.open_part(1)
    if os.fork():
        os.close(output)
        os.close(lock)
        return job, False
    # The lock stays open until this process ends, however it does.
    os.setsid()  # no terminal ends it, nor does a shell at its end
    nothing = os.open(os.devnull, os.O_RDONLY)
    for own, standard in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(own, standard)
    os.close(nothing)
    os.close(output)
    threading.Thread(target=_limit, args=(job,), daemon=True).start()
    return job, True


def _limit(job: DetachedJob) -> None:
    """Begin another part of the log whenever this one is large. The oldest is removed then."""
    number = 1
    while True:
        time.sleep(_CHECK_S)
        if os.fstat(1).st_size > LOG_LIMIT:
            try:
                output = job.open_part(number + 1)
            except OSError as error:  # a full disk may have room again
                log.error(f"the log of {job.name} cannot go on in another file: {error.strerror}.")
                return
            number += 1
            for standard in (1, 2):
                os.dup2(output, standard)
            os.close(output)
