"""The one exception that people read: a sentence about their input, never a traceback.

Everything else that is raised is a bug or a failed job, and keeps its traceback.
"""

from __future__ import annotations

import os
import sys
import time

DONE = 0
FAILED = 1
BAD_INPUT = 2
STOPPED = 75  # EX_TEMPFAIL: on request, after a checkpoint; the same command goes on
INTERRUPTED = 130  # 128 + SIGINT, as a shell has it


class UserError(Exception):
    """Bad input: one sentence with what was found, what was expected and what mends it.

    The command line prints it on stderr, once per job, and exits with code 2.
    """


def print_from_one_rank(sentence: str, rank: int, local_rank: int) -> None:
    """Print what every rank may have to say, where they cannot talk to each other; then it is to exit.

    Rank 0 speaks at once, and its end makes most launchers end the others. One rank of each host
    that is still there then speaks too: the trouble may be that host's alone.
    """
    if rank != 0:
        time.sleep(2.0)
    if rank == 0 or local_rank == 0:
        print(sentence, file=sys.stderr, flush=True)


def silence_stdout() -> None:
    """Nobody reads it any more: what follows goes nowhere, and Python does not complain at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
