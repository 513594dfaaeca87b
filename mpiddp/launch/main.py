"""`mpiddp launch`: one command that starts a script on every host of a hostfile.

Reads the hosts, composes one command for the MPI that is installed, runs it, and turns its end into
an exit code.

    mpiddp launch --hostfile hostfiles/two_nodes --dry-run train.py --epochs 3
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from mpiddp.launch.flavours import compose
from mpiddp.launch.mpi import Mpi, with_own_folder
from mpiddp.launch.options import parse_options
from mpiddp.launch.plan import make_plan
from mpiddp.launch.process import End, run_to_the_end

DONE, FAILED, BAD_INPUT, STOPPED_AFTER_CHECKPOINT, INTERRUPTED = 0, 1, 2, 75, 130


def main(argv: list[str]) -> int:
    """Launch what `argv` says. The exit code: 0 done, 1 the job failed, 2 its ranks refused their
    input, 75 stopped on request after a checkpoint, 130 interrupted.

    Raises:
        UserError: bad input, found before anything was started.
    """
    started_at = time.time()
    options = parse_options(argv)
    mpi, request = make_plan(options, started_at, os.environ, _say)
    command = compose(mpi, request)
    if options.dry_run:
        print(command.explained())
        return DONE
    with _private_folder(needed=bool(command.files)) as folder:
        command = compose(mpi, replace(request, scratch=folder))
        command.write_files()
        env = {**with_own_folder(mpi.program, os.environ), **command.settings}
        return _exit_code(mpi, run_to_the_end(command.argv, env))


@contextmanager
def _private_folder(needed: bool) -> Iterator[str]:
    if not needed:
        yield "."
        return
    import tempfile  # costs 10 ms, and most jobs need no file

    with tempfile.TemporaryDirectory(prefix="mpiddp-") as folder:
        yield folder


def _exit_code(mpi: Mpi, end: End) -> int:
    """The launcher's own code, after the one sentence that the ranks cannot have said."""
    if end.code == STOPPED_AFTER_CHECKPOINT:
        return end.code
    if end.interrupted:
        _say("interrupted: the job was stopped.")
        return INTERRUPTED
    if end.code in (DONE, BAD_INPUT):  # a rank that refuses its input has said why
        return end.code
    _say(f"the job failed: {_cause(mpi, end.code)}.")
    return FAILED


def _cause(mpi: Mpi, code: int) -> str:
    if code < 0:
        return f"{mpi.program.name} was killed by {signal.Signals(-code).name}"
    # Elsewhere 128 + N may be a code that the launcher made up, or that of a rank it has ended.
    if mpi.flavour == "openmpi" and code - 128 in set(signal.Signals):
        return f"a rank was killed by {signal.Signals(code - 128).name}"
    return f"{mpi.program.name} ended with exit code {code}"


def _say(sentence: str) -> None:
    print(f"mpiddp: {sentence}", file=sys.stderr, flush=True)
