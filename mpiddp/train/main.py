"""`mpiddp train`: train alone, or as one rank of a job under mpiddp launch, mpirun, srun or torchrun."""

from __future__ import annotations

import mpiddp
from mpiddp.errors import UserError
from mpiddp.train.options import parse


def main(argv: list[str]) -> int:
    """Train, and return the exit code. With bad input all ranks exit, and rank 0 prints the sentence."""
    try:
        options = parse(argv)
    except UserError as error:
        if mpiddp.World.from_env().world_size == 1:
            raise
        with mpiddp.process_group(backend="gloo"), mpiddp.together():
            raise error from None
    from mpiddp.train.train import main as train  # only now: it imports torch

    return train(options)
