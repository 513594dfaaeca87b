"""The agent of a rank, which mpirun starts: a Rank comes in, its script runs, and the exit code goes out.

    mpirun … python -m mpiddp run train.py --lr 0.1
    mpirun … python -m mpiddp run -- ./any_command

The agent never imports torch. It starts the script's Python at once, which waits while the agent meets the
others: over the launcher's channel, under a raw mpirun over MPI. A command starts once the ranks have met.
"""

from __future__ import annotations

import os
import signal

from mpiddp.hosts.processes import (
    OPEN_BESIDES,
    allow_open,
    descendants,
    signal_at_parents_end,
)
from mpiddp.protocol.channel import AGENT_NAME, name_process
from mpiddp.protocol.terminal import give_size
from mpiddp.runtime.helpers import Helpers
from mpiddp.runtime.program import MODULE, SCRIPT, parse
from mpiddp.runtime.rank import Rank, python_by_hand
from mpiddp.runtime.rank_attempt import RankAttempt
from mpiddp.runtime.store_server import StoreServer
from mpiddp.world import enter_inner_job, is_joined, is_started_by_an_mpi

_SOCKETS_PER_RANK = 3  # to torch's store: for `process_group`, a script's own group, and one more


def main(argv: list[str]) -> int:
    """Run `mpiddp run ARGV`: be a rank of a job, and return the exit code of its program."""
    program = parse(argv)
    # A rank's program has started it: by an mpirun of its own, or it is the program's own process.
    if is_joined(os.environ) and is_started_by_an_mpi(os.environ):
        enter_inner_job(os.environ)
    elif is_joined(os.environ):
        python = {SCRIPT: python_by_hand(), MODULE: [*python_by_hand(), "-m"]}
        argv = [*python.get(program.kind, []), program.name, *program.args]
        program.check()
        os.execvp(argv[0], argv)
    # Not by os._exit: MPICH tells its mpirun in a handler of atexit that a rank has finalized MPI.
    return run(Rank.from_env(program))


def run(rank: Rank) -> int:
    """Make one attempt after another, as the launcher asks. Returns the exit code of the last."""
    if rank.daemon is not None:
        signal_at_parents_end(signal.SIGTERM)
    # A parent that ignores SIGCHLD passes that on. Then the kernel would reap the script before this process.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # By this name, the launcher leaves agents alone when it kills the rest of a job: they pass on the last output.
    name_process(AGENT_NAME)
    allow_open(_SOCKETS_PER_RANK * rank.world.world_size + OPEN_BESIDES)
    if rank.launcher is None:
        give_size(1)
    store = StoreServer(helpers := Helpers(descendants(os.getpid())))
    attempt = RankAttempt(rank, helpers, store)
    try:
        while True:
            code = attempt.run()
            store.release()
            if attempt.again is None:
                return code
            attempt = RankAttempt(attempt.rank.next(attempt.again), helpers, store, attempt.spare)
    finally:
        if attempt.spare is not None:
            attempt.spare.discard()
