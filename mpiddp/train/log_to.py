"""`--log-to` on rank 0: a process for each tool (`sinks`), and a warning when one of them fails."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from mpiddp.checkpoints.run_dir import RunDir
from mpiddp.runtime.job.stop import PASSED
from mpiddp.runtime.log import log
from mpiddp.text import escaped
from mpiddp.train.sinks import FINISH_S

_END_S = 2.0  # for a process to end after FINISH_S


@contextlib.contextmanager
def logged_to(tools: str | None, run: RunDir) -> Iterator[None]:
    """Send the records of the run to these tools while the body runs. Call this on rank 0 alone.

    The process of a tool takes the last records and ends, also if this process is killed.
    """
    with contextlib.ExitStack() as started:
        watches = []
        for tool in tools.split(",") if tools else ():
            try:
                process = _start(tool, run)
            except OSError as error:  # a full disk; the training matters more
                log.warning(f"warning: --log-to {tool}: {error}.")
                continue
            assert process.stdin is not None
            # A DataLoader's worker is a fork, and would keep the records open until this process ends.
            os.register_at_fork(after_in_child=process.stdin.close)
            started.enter_context(process.stdin)  # its end is the end of the records
            watch = threading.Thread(
                target=_warn_of_failure, args=(tool, run, process), daemon=True
            )
            watch.start()
            watches.append((watch, process))
        yield
    # Not after an error, which the other ranks must learn of now.
    deadline = time.monotonic() + FINISH_S + _END_S
    for watch, process in watches:
        watch.join(max(0.0, deadline - time.monotonic()))
        if watch.is_alive():  # the package holds Python's lock
            process.kill()


def _start(tool: str, run: RunDir) -> subprocess.Popen[bytes]:
    # A batch system signals every process of a job, and the ranks may still save: it inherits this mask.
    size = run.metrics.stat().st_size
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED)
    try:
        with _log(tool, run).open("ab") as printed:
            return subprocess.Popen(
                [sys.executable, "-m", "mpiddp.train.sinks", tool, str(run.path), str(size)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,  # why it failed
                stderr=printed,
                start_new_session=True,
            )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _log(tool: str, run: RunDir) -> Path:
    return run.logs / f"log_to_{tool}.log"


def _warn_of_failure(tool: str, run: RunDir, process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    why = process.stdout.read().decode(errors="replace").strip()
    if code := process.wait():
        why = why or f"its process ended with code {code}"
    if why:
        log.warning(
            f"warning: --log-to {tool}: {escaped(why)}. The training continues, and metrics.jsonl has "
            f"all records. See: {_log(tool, run)}"
        )
