"""The steps of a script that tells none: those of its optimizers, which torch reports."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary


def report_optimizer_steps(report: Callable[[int], None]) -> None:
    """Let torch call `report` after each step of any optimizer, with the number of steps of that one.

    It is a public hook of torch, and costs a microsecond a step. A compiled optimizer reports none.
    """
    import torch
    from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

    counts: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()

    def count(optimizer: Optimizer, args: object, kwargs: object) -> None:
        if torch.compiler.is_compiling():
            return
        counts[optimizer] = steps = counts.get(optimizer, 0) + 1
        report(steps)

    register_optimizer_step_post_hook(count)
