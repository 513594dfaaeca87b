"""A rank of `python -m benchmarks.batching`: trains on padded, bucketed and packed batches in turn."""

from __future__ import annotations

import copy
import random
import sys
import time
from collections.abc import Sequence
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.batching import BUCKETED, PACKED, VARIANTS, Options, rank_options
from examples.gpt.batches import (
    Step,
    bucketed,
    collate,
    count_targets,
    packed,
    padded,
)
from examples.gpt.data import entries, load_text, paragraphs
from examples.gpt.model import GPT, Shape, summed_loss
from mpiddp.bench.result_lines import emit
from mpiddp.bench.rounds import turns
from mpiddp.runtime.torch.process_group import process_group
from mpiddp.world import World


def main() -> None:
    options = rank_options(sys.argv[1:])
    with process_group(backend="gloo") as world:
        text = load_text(None, context=1)
        every = [
            text.encode(each[: options.longest])
            for each in (entries() if options.texts == "entries" else paragraphs(entries()))
        ]
        torch.manual_seed(0)
        net = GPT(Shape(len(text.characters)))
        blocks: dict[str, list[dict[str, Any]]] = {name: [] for name in VARIANTS}
        for number, variant in turns(VARIANTS, options.rounds, warmup=1):
            chosen = random.Random(number).sample(every, min(options.documents, len(every)))
            steps = plan(variant, chosen, options, world.world_size, seed=number)
            block = train(copy.deepcopy(net), chosen, steps, width(variant, options), world)
            if number > 0:
                blocks[variant].append(block)
        if world.rank == 0:
            emit({"blocks": blocks, "documents": described(every, options)})


def plan(
    variant: str, documents: Sequence[Tensor], options: Options, ranks: int, seed: int
) -> list[Step]:
    """The steps of a block, without a smaller last one. A packed step has about as many characters."""
    lengths = [len(each) for each in documents]
    rows = options.rows
    if variant == PACKED:
        per_row = (options.longest - 1) / (mean(lengths) - 1)
        rows = max(1, round(options.rows / per_row))
        steps = packed(lengths, rows, ranks, options.longest - 1, seed)
    else:
        steps = (bucketed if variant == BUCKETED else padded)(lengths, rows, ranks, seed)
    whole = [step for step in steps if all(len(each) == rows for each in step)]
    return whole or steps


def width(variant: str, options: Options) -> int | None:
    return options.longest - 1 if variant == PACKED else None


def train(
    net: GPT, documents: Sequence[Tensor], steps: Sequence[Step], width: int | None, world: World
) -> dict[str, Any]:
    """Train once on these steps. Returns the block's seconds, and each step's compute time by rank."""
    batches = [collate(documents, step[world.rank], width) for step in steps]
    targets = [count_targets(documents, step) for step in steps]
    parameters = list(net.parameters())
    gradients = torch.zeros(sum(each.numel() for each in parameters))
    for parameter, part in zip(
        parameters, gradients.split([each.numel() for each in parameters]), strict=True
    ):
        parameter.grad = part.view_as(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    compute_s = []
    dist.barrier()
    start = time.perf_counter()
    for batch, total in zip(batches, targets, strict=True):
        begun = time.process_time()
        loss = summed_loss(net(batch.tokens, batch.mask), batch.targets) / total
        loss.backward()
        compute_s.append(time.process_time() - begun)
        # Not DistributedDataParallel, which would communicate within the time that is measured.
        dist.all_reduce(gradients)
        optimizer.step()
        gradients.zero_()
    seconds = time.perf_counter() - start
    of_ranks: list[Any] = [None] * world.world_size
    positions = sum(batch.tokens.numel() for batch in batches)
    dist.all_gather_object(of_ranks, (compute_s, seconds, positions))
    computes, times, computed = zip(*of_ranks, strict=True)
    return {
        "seconds": max(times),
        "targets": sum(targets),
        "positions": sum(computed),
        "compute_s": list(zip(*computes, strict=True)),  # [steps][ranks]
    }


def described(documents: Sequence[Tensor], options: Options) -> str:
    lengths = [len(each) for each in documents]
    return (
        f"{len(lengths):,} {options.texts} of {min(lengths)} to {max(lengths):,} characters, "
        f"median {median(lengths):,.0f}, mean {mean(lengths):,.0f}; "
        f"{min(options.documents, len(lengths))} in a round"
    )


if __name__ == "__main__":
    main()
