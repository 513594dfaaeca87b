"""What a rank pays for being watched: the hook that counts its steps, its reports, and a look at its stacks.

    mpiddp launch -n 1 benchmarks/ranks/watched.py

The optimizer of one number makes steps with torch's global hooks and without them, in alternation.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch.optim import optimizer as torch_optimizer

import mpiddp
from mpiddp.runtime.job.reports import look

ROUNDS, CALLS = 40, 2000
STEP_S = 0.002  # of which the costs are shares


def seconds(call: Callable[[], object]) -> float:
    """The processor seconds of a call: other programs use this machine, too."""
    began = time.thread_time()
    for _ in range(CALLS):
        call()
    return (time.thread_time() - began) / CALLS


def main() -> None:
    with mpiddp.process_group():
        number = torch.zeros(1, requires_grad=True)
        number.grad = torch.zeros(1)
        sgd = torch.optim.SGD([number], lr=0.1)
        hooks = torch_optimizer._global_optimizer_post_hooks
        watched = dict(hooks)
        assert watched, "no hook counts the steps: run this under mpiddp launch"
        costs, step = [], 0
        for _ in range(ROUNDS):
            hooks.clear()
            alone = seconds(sgd.step)
            hooks.update(watched)
            costs.append(seconds(sgd.step) - alone)
        told = []
        for _ in range(ROUNDS):
            began = time.thread_time()
            for _ in range(CALLS):
                step += 1
                mpiddp.progress(step, 10**9, loss=0.5, lr=0.1)
            told.append((time.thread_time() - began) / CALLS)
        look()  # imports what it needs
        looks = []
        for _ in range(ROUNDS):
            began = time.thread_time()
            look()
            looks.append(time.thread_time() - began)
        for name, cost in (("counting a step", median(costs)), ("mpiddp.progress", median(told))):
            print(f"{name}: {1e6 * cost:.2f} µs, {cost / STEP_S:.3%} of a step of 2 ms")
        print(f"a look: {1e3 * median(looks):.2f} ms, {median(looks):.3%} if there is one a second")


if __name__ == "__main__":
    main()
