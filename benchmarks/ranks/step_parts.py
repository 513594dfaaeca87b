"""A rank of `python -m benchmarks.step_parts`: blocks of steps, and blocks of their parts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.step_parts import ALL_REDUCE, CONVOLUTIONS, PARTS, SILENT, STEP, rank_options
from mpiddp.bench.ranks.training import (
    bare_step,
    build,
    open_source,
    settings,
    synthetic_job,
)
from mpiddp.bench.result_lines import emit
from mpiddp.bench.rounds import turns
from mpiddp.train.config import TrainConfig
from mpiddp.train.engine import autocast
from mpiddp.world import World


def main() -> None:
    options, training = rank_options(sys.argv[1:])
    with synthetic_job(World.from_env(), training) as job:
        data = open_source(job)
        state = build(job, data)
        [(images, labels)] = data.train.batches([torch.arange(job.config.batch_size)], epoch=0)
        ddp = state.model
        assert isinstance(ddp, DistributedDataParallel)  # the default
        parameters = sum(each.numel() for each in ddp.parameters())
        gradients = torch.zeros(parameters, device=job.device)

        def step() -> None:
            bare_step(state, job.config, images, labels)

        def silent_step() -> None:
            with ddp.no_sync():
                step()

        run: dict[str, Callable[[], object]] = {
            STEP: step,
            SILENT: silent_step,
            ALL_REDUCE: lambda: dist.all_reduce(gradients),
            CONVOLUTIONS: convolutions(ddp.module, job.config, images),
        }
        found: dict[str, list[float]] = {name: [] for name in PARTS}
        for number, name in turns(PARTS, options.rounds, warmup=1):
            taken = _timed(run[name], options.steps, job.device)
            if number > 0:
                found[name].append(taken)
        if job.is_rank_0:
            emit({"step_s": found, "settings": settings(job), "hosts": job.hosts})


def convolutions(model: nn.Module, config: TrainConfig, images: Tensor) -> Callable[[], None]:
    """A function that runs each convolution of the model on an input of its own, and back."""
    inputs: list[tuple[nn.Conv2d, Tensor]] = []

    def record(layer: nn.Conv2d, given: tuple[Tensor]) -> None:
        inputs.append((layer, torch.randn_like(given[0])))

    layers = [each for each in model.modules() if isinstance(each, nn.Conv2d)]
    hooks = [each.register_forward_pre_hook(record) for each in layers]
    with torch.no_grad(), autocast(config, images.device):
        model(images)
    for hook in hooks:
        hook.remove()
    for _, given in inputs[1:]:  # nothing needs the gradient of the images
        given.requires_grad_()

    def run() -> None:
        with autocast(config, images.device):
            for layer, given in inputs:
                out = layer(given)
                wanted = [each for each in (layer.weight, given) if each.requires_grad]
                torch.autograd.grad(out, wanted, torch.ones_like(out))

    return run


def _timed(run: Callable[[], object], count: int, device: torch.device) -> float:
    """The mean seconds of a call."""
    run()  # refill the caches after the other blocks
    dist.barrier()
    start = _now(device)
    for _ in range(count):
        run()
    return (_now(device) - start) / count


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    main()
