"""`mpiddp train` on a machine whose memory flips one bit, in the first attempt of the job.

    mpiddp launch -n 3 tests/programs/flipped_bit.py WHAT RANK STEP OPTIONS…

WHAT is "parameter" or "momentum". The bit is flipped after the step.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from mpiddp import cli

what, rank, left = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


def after_step(optimizer, args, kwargs):
    global left
    left -= 1
    if left == 0 and dist.get_rank() == rank:
        parameter = optimizer.param_groups[0]["params"][-1]  # the last layer's matrix
        tensor = parameter.detach()
        if what == "momentum":
            tensor = optimizer.state[parameter]["momentum_buffer"]
        if hasattr(tensor, "to_local"):  # a shard
            tensor = tensor.to_local()
        # The lowest bit of a momentum may be lost in the rounding of the next step.
        tensor.view(torch.int32)[-1, -1] ^= 1 << (0 if what == "parameter" else 20)


if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
    register_optimizer_step_post_hook(after_step)
sys.exit(cli.main(["train", *sys.argv[4:]]))
