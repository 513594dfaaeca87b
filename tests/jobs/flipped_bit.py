"""`mpiddp train` on a machine whose memory flips one bit, in the first attempt of the job.

    mpirun -np 3 python -m tests.jobs.flipped_bit WHAT RANK STEP OPTIONS…

WHAT is "parameter" or "momentum". The bit is flipped after the step. `tests.jobs.turns` can run it too.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from mpiddp import cli
from mpiddp.protocol.variables import RESTART_COUNT
from tests.jobs.diverging import flip


def main(what: str, rank: str, step: str, *options: str) -> None:
    left = int(step)

    def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0 and dist.get_rank() == int(rank):
            parameter = optimizer.param_groups[0]["params"][-1]  # the last layer's matrix
            momentum = optimizer.state[parameter]["momentum_buffer"]
            # The lowest bit of a momentum may be lost in the rounding of the next step.
            flip(parameter) if what == "parameter" else flip(momentum, bit=20)

    hook = register_optimizer_step_post_hook(after_step)
    if os.environ.get(RESTART_COUNT, "0") != "0":
        hook.remove()
    try:
        code = cli.main(["train", *options])
    finally:
        hook.remove()
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
