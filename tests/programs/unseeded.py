"""`mpiddp train` whose numbers do not all come from the seed: one rank adds noise from a clock's seed.

    mpiddp launch -n 2 tests/programs/unseeded.py WHAT RANK OPTIONS…

The noise is in the "loss" (the last layer's output), in a "gradient" or in a "parameter".
"""

import os
import sys

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mpiddp import cli

what, rank = sys.argv[1:3]
generator = torch.Generator()
generator.seed()


def add_noise(tensor):
    if os.environ["RANK"] == rank:
        # Through `data`, so that autograd does not notice, as it would not notice a faulty kernel.
        tensor.data += 1e-3 * torch.randn(tensor.shape, generator=generator)


def after_forward(module, inputs, output):
    if what == "loss" and isinstance(module, nn.Linear):
        add_noise(output)


def before_step(optimizer, args, kwargs):
    matrices, vectors = (group["params"] for group in optimizer.param_groups)
    if what == "gradient":
        grad = matrices[0].grad
        add_noise(grad.to_local() if hasattr(grad, "to_local") else grad)
    if what == "parameter":
        add_noise(vectors[-1])


register_module_forward_hook(after_forward)
register_optimizer_step_pre_hook(before_step)
sys.exit(cli.main(["train", *sys.argv[3:]]))
