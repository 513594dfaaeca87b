"""`mpiddp train` on a machine with a fault, on one rank.

    mpiddp launch -n 3 tests/programs/faulty_training.py flip WHAT RANK STEP OPTIONS…
    mpiddp launch -n 2 tests/programs/faulty_training.py noise WHAT RANK OPTIONS…

flip: its memory flips one bit after the step, in the first attempt of the job, of a "parameter" or of a
"momentum". noise: numbers from a clock's seed are added to the "loss" (the last layer's output), to a
"gradient" or to a "parameter".
"""

import os
import sys

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from mpiddp import cli

fault, what, rank, *options = sys.argv[1:]
is_faulty = os.environ["RANK"] == rank
generator = torch.Generator()
generator.seed()


def own(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a shard


def flip_after(step):
    def after_step(optimizer, args, kwargs):
        nonlocal step
        step -= 1
        if step == 0:
            parameter = optimizer.param_groups[0]["params"][-1]  # the last layer's matrix
            tensor = parameter.detach()
            if what == "momentum":
                tensor = optimizer.state[parameter]["momentum_buffer"]
            # The lowest bit of a momentum may be lost in the rounding of the next step.
            own(tensor).view(torch.int32)[-1, -1] ^= 1 << (0 if what == "parameter" else 20)

    if is_faulty and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        register_optimizer_step_post_hook(after_step)


def add_noise(tensor):
    if is_faulty:
        # Through `data`, so that autograd does not notice, as it would not notice a faulty kernel.
        tensor.data += 1e-3 * torch.randn(tensor.shape, generator=generator)


def after_forward(module, inputs, output):
    if what == "loss" and isinstance(module, nn.Linear):
        add_noise(output)


def before_step(optimizer, args, kwargs):
    matrices, vectors = (group["params"] for group in optimizer.param_groups)
    if what == "gradient":
        add_noise(own(matrices[0].grad))
    if what == "parameter":
        add_noise(vectors[-1])


if fault == "flip":
    flip_after(int(options.pop(0)))
else:
    register_module_forward_hook(after_forward)
    register_optimizer_step_pre_hook(before_step)
sys.exit(cli.main(["train", *options]))
