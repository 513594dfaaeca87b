"""Receive what the ranks wrote last, once mpirun has ended. An output process that hangs is given up."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from mpiddp.launch.supervise.mpirun_process import MpirunProcess
from mpiddp.launch.supervise.output import Outputs

SILENT_S = 5.0  # until output that neither continues nor ends is given up
KILLED_S = 0.5  # for the last lines of a job that a second signal has killed


def receive_last_output(
    outputs: Outputs,
    mpirun: MpirunProcess,
    awaited: Callable[[Collection[int]], str],
    *,
    wait: Callable[[float], None],
    is_killed: Callable[[], bool],
) -> None:
    """Copy the output to its end.

    Args:
        awaited: the names of those of the given ranks that are worth waiting for, "" for none.
        wait: handle what happens within so many seconds.
        is_killed: whether a second signal asks for an end at once, even if a stopped terminal takes nothing.
    """
    began_at = time.monotonic()
    while late := awaited(outputs.open_ranks) or ("a rank" if mpirun.has_output_processes else ""):
        if outputs.idle_s > SILENT_S:
            outputs.log(f"the last output of {late} has not arrived; it may be missing here.")
            break
        if is_killed() and time.monotonic() > began_at + KILLED_S:
            break
        wait(0.02)
    if late:
        mpirun.kill_output_processes()
    outputs.finish()
    while not outputs.is_finished(0.05) and not is_killed():
        wait(0.05)
