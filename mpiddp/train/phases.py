"""The phases of a step: data, forward, backward, waiting for other ranks, and the optimizer.

Hooks of torch mark where one phase ends and the next one begins.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mpiddp.train.metrics import StepTimer
from mpiddp.train.parallel import is_sharded


def mark_phases(timer: StepTimer, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Let the timer know the phases of each step.

    The backward pass ends with the gradient of the first parameter. What is left of it waits for the sum over
    all ranks. A sharded model waits within its passes, which take this time too.

    Args:
        model: the model to call, as `parallel.wrap` returns it.
    """

    def before_forward(module: nn.Module, args: object) -> None:
        if module.training:
            timer.phase_ends("data")

    def after_forward(module: nn.Module, args: object, output: object) -> None:
        if module.training:
            timer.phase_ends("forward")

    def after_first_gradient(parameter: Tensor) -> None:
        timer.phase_ends("backward")

    def before_optimizer(optimizer: object, args: object, kwargs: object) -> None:
        timer.phase_ends("backward" if is_sharded(model) else "waiting")

    model.register_forward_pre_hook(before_forward)
    model.register_forward_hook(after_forward)
    optimizer.register_step_pre_hook(before_optimizer)
    first = next((p for p in model.parameters() if p.requires_grad), None)
    if first is not None and not is_sharded(model):
        first.register_post_accumulate_grad_hook(after_first_gradient)
