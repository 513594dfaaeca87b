"""A rank of `python -m benchmarks.variants`: one of the two ranks of a variant."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.variants import RANKS, RankOptions, Variant, rank_options
from mpiddp.bench.result_lines import emit
from mpiddp.bench.rounds import turns
from mpiddp.runtime.script import keep_freed_memory
from mpiddp.runtime.torch.process_group import process_group
from mpiddp.train import parallel
from mpiddp.train.config import TrainConfig, resolve_defaults
from mpiddp.train.options import parse
from mpiddp.train.resnet import ARCHS
from mpiddp.world import World


def main() -> None:
    options = rank_options(sys.argv[1:])
    variants = options.variants()
    torch.set_num_threads(1)
    with process_group(backend="gloo") as world:
        indices = range(len(variants))
        groups = [dist.new_group([RANKS * index + n for n in range(RANKS)]) for index in indices]
        own = world.rank // RANKS
        step = stepper(list(variants.values())[own], options, groups[own])
        seconds = []
        for number, turn in turns(indices, options.rounds, warmup=1):
            dist.barrier()
            if turn == own:
                taken = _timed(step, options.steps, groups[own])
                if number > 0:
                    seconds.append(taken)
        everyone: list[list[float]] = [[]] * world.world_size
        dist.all_gather_object(everyone, seconds)
        if world.rank == 0:
            found = dict(zip(variants, everyone[::RANKS], strict=True))
            emit({"stem": options.stem, "seconds": found})


def _config(variant: Variant) -> TrainConfig:
    options = parse([f"--grad-compression={variant.compression}"])
    return resolve_defaults(options, World(0, RANKS, 0, RANKS), on_gpu=False, has_bf16=False)


def stepper(variant: Variant, options: RankOptions, group: dist.ProcessGroup) -> Callable[[], None]:
    """Build a model, an optimizer and a batch, and return a function that runs one step on them."""
    if variant.keeps_memory:
        keep_freed_memory({})
    torch.manual_seed(0)
    layout = torch.channels_last if variant.channels_last else torch.contiguous_format
    model: nn.Module = ARCHS["resnet18"](num_classes=10, stem=options.stem)
    model = model.to(memory_format=layout)  # type: ignore[call-overload]
    images = torch.randn(options.batch_size, 3, 32, 32).to(memory_format=layout)
    labels = torch.randint(10, (options.batch_size,))
    if variant.compile == "inside":
        model = torch.compile(model)  # type: ignore[assignment]
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    sync = {"forward_sync_buffers" if renamed else "broadcast_buffers": not variant.own_buffers}
    ddp = DistributedDataParallel(
        model,
        process_group=group,
        gradient_as_bucket_view=variant.bucket_view,
        bucket_cap_mb=variant.bucket_mb,
        **sync,  # type: ignore[arg-type]
    )
    parallel.compress(ddp, _config(variant))
    optimizer = torch.optim.SGD(
        ddp.parameters(), 0.01, momentum=0.9, weight_decay=5e-4, fused=variant.fused
    )
    forward = torch.compile(ddp) if variant.compile == "outside" else ddp

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=variant.bf16):
            loss = F.cross_entropy(forward(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _timed(step: Callable[[], None], steps: int, group: dist.ProcessGroup) -> float:
    """The mean seconds per step in a block of steps."""
    step()  # refill the caches after the other variants' turns
    dist.barrier(group)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - start) / steps


if __name__ == "__main__":
    main()
