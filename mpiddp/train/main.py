"""`mpiddp train`: train as one rank of a job, or alone.

The command is the same under mpirun, srun and torchrun. This module parses the options without torch, so
--help and option errors appear at once. `mpiddp.train.train` does the rest.
"""

from __future__ import annotations

import mpiddp
from mpiddp.errors import UserError
from mpiddp.train.options import parse


def main(argv: list[str]) -> int:
    """Train, and return the exit code: DONE, or STOPPED if the training ends early on request.

    With bad input, of several ranks all exit, and rank 0 prints the sentence.
    """
    try:
        options = parse(argv)
    except UserError as error:
        if mpiddp.World.from_env().world_size == 1:
            raise
        with mpiddp.process_group(backend="gloo"), mpiddp.together():
            raise error from None
    from mpiddp.train.train import main as train

    return train(options)
