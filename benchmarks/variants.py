"""Measures what each setting of a step is worth on a CPU, and prints docs/performance.md's tables.

    mpirun -np 42 --bind-to none --oversubscribe python -m benchmarks.variants --out v.jsonl
    python -m benchmarks.variants --table v.jsonl

Plain is the loop that the guides show: DistributedDataParallel with its defaults, fp32, NCHW, torch's SGD.
Every variant has two ranks of its own: in one process, the memory that one variant frees would serve the
next. Blocks of steps take turns, so what else the machine does meets all of them alike, and "plain again"
shows what is left of that: the noise.
"""

from __future__ import annotations

import argparse
import inspect
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mpiddp.errors import UserError
from mpiddp.runtime.process_group import process_group
from mpiddp.runtime.process_setup import keep_freed_memory
from mpiddp.train import parallel
from mpiddp.train.config import TrainConfig, resolve_defaults
from mpiddp.train.options import parse
from mpiddp.train.resnet import ARCHS
from mpiddp.world import World

RANKS = 2  # of each variant
BATCH = 64  # images per rank


@dataclass(frozen=True)
class Variant:
    channels_last: bool = False
    bf16: bool = False
    bucket_view: bool = False
    bucket_mb: int = 25
    fused: bool = False
    own_buffers: bool = False  # BatchNorm statistics stay on their rank while it trains
    compression: str = "off"
    compile: str = ""  # the model "inside" of DDP, or DDP with it
    keeps_memory: bool = False  # what is freed is not given back to the system


PLAIN = Variant()
TUNED_FP32 = Variant(
    channels_last=True,
    bucket_view=True,
    fused=True,
    own_buffers=True,
    keeps_memory=True,
)
DEFAULTS = replace(TUNED_FP32, bf16=True)
VARIANTS = {
    "plain": PLAIN,
    "plain again (noise)": PLAIN,
    "freed memory kept": Variant(keeps_memory=True),
    "channels_last": Variant(channels_last=True),
    "gradients as bucket views": Variant(bucket_view=True),
    "buckets of 100 MiB": Variant(bucket_mb=100),
    "fused SGD": Variant(fused=True),
    "no buffer broadcast": Variant(own_buffers=True),
    "bf16": Variant(bf16=True),
    "bf16 gradients on the wire": Variant(compression="bf16"),
    "all in fp32": TUNED_FP32,
    "all in fp32, NCHW": replace(TUNED_FP32, channels_last=False),
    "all in fp32, memory given back": replace(TUNED_FP32, keeps_memory=False),
    "all in fp32, buckets of 100 MiB": replace(TUNED_FP32, bucket_mb=100),
    "the defaults": DEFAULTS,
    "the defaults, memory given back": replace(DEFAULTS, keeps_memory=False),
    "the defaults, buckets of 10 MiB": replace(DEFAULTS, bucket_mb=10),
    "the defaults, buckets of 100 MiB": replace(DEFAULTS, bucket_mb=100),
    "the defaults, NCHW": replace(DEFAULTS, channels_last=False),
    "the defaults, bf16 gradients": replace(DEFAULTS, compression="bf16"),
    "the defaults, fp16 gradients": replace(DEFAULTS, compression="fp16"),
}
COMPILED = {
    "all in fp32, compiled inside DDP": replace(TUNED_FP32, compile="inside"),
    "all in fp32, compiled with DDP": replace(TUNED_FP32, compile="outside"),
    "the defaults, compiled inside DDP": replace(DEFAULTS, compile="inside"),
    "the defaults, compiled with DDP": replace(DEFAULTS, compile="outside"),
}


def _config(variant: Variant) -> TrainConfig:
    options = parse([f"--grad-compression={variant.compression}"])
    return resolve_defaults(options, World(0, RANKS, 0, RANKS), on_gpu=False, has_bf16=False)


def stepper(variant: Variant, stem: str, group: dist.ProcessGroup) -> Callable[[], None]:
    """One step of the variant, on a model, an optimizer and a batch of its own."""
    if variant.keeps_memory:
        keep_freed_memory()
    torch.manual_seed(0)
    layout = torch.channels_last if variant.channels_last else torch.contiguous_format
    model: nn.Module = ARCHS["resnet18"](num_classes=10, stem=stem)
    model = model.to(memory_format=layout)  # type: ignore[call-overload]
    images = torch.randn(BATCH, 3, 32, 32).to(memory_format=layout)
    labels = torch.randint(10, (BATCH,))
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


def measure(options: argparse.Namespace) -> None:
    variants = _chosen(options)
    names = list(variants)
    torch.set_num_threads(1)
    with process_group(backend="gloo") as world:
        if world.world_size != RANKS * len(names):
            raise UserError(f"{len(names)} variants need mpirun -np {RANKS * len(names)}.")
        places = range(len(names))
        groups = [dist.new_group([RANKS * place + n for n in range(RANKS)]) for place in places]
        place = world.rank // RANKS
        step = stepper(variants[names[place]], options.stem, groups[place])
        seconds = []
        for number in range(1 + options.rounds):  # the first one warms up
            first = number % len(names)
            for turn in [*places[first:], *places[:first]]:
                dist.barrier()
                if turn == place:
                    seconds.append(_timed(step, options.steps, groups[place]))
        everyone: list[list[float]] = [[]] * world.world_size
        dist.all_gather_object(everyone, seconds[1:])
        if world.rank == 0:
            found = dict(zip(names, everyone[::RANKS], strict=True))
            with Path(options.out).open("a") as file:
                file.write(json.dumps({"stem": options.stem, "seconds": found}) + "\n")


def _chosen(options: argparse.Namespace) -> dict[str, Variant]:
    if options.only:
        return {name: (VARIANTS | COMPILED)[name] for name in options.only.split("; ")}
    return VARIANTS | COMPILED if options.compiled else VARIANTS


def _timed(step: Callable[[], None], steps: int, group: dist.ProcessGroup) -> float:
    """The mean seconds of a step in a block of them."""
    step()  # its caches, after the others
    dist.barrier(group)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - start) / steps


def table(path: Path) -> str:
    """For each stem: step times, and the speed over plain's block of the same round.

    The last column has the median of each job by itself.
    """
    jobs = [json.loads(line) for line in path.read_text().splitlines()]
    lines: list[str] = []
    for stem in dict.fromkeys(job["stem"] for job in jobs):
        lines += [f"ResNet-18, {stem} stem:", "", "| variant | ms a step | speed | jobs |"]
        lines += ["|---|---|---|---|"]
        runs = [job["seconds"] for job in jobs if job["stem"] == stem]
        for name in dict.fromkeys(name for run in runs for name in run):
            ours = [run for run in runs if name in run]
            speeds = [_speeds(run, name) for run in ours]
            every = median(speed for job in speeds for speed in job)
            ms = median(s for run in ours for s in run[name]) * 1e3
            each = ", ".join(f"{median(job):.2f}" for job in speeds)
            lines.append(f"| {name} | {ms:.0f} | {every:.2f} | {each} |")
        lines.append("")
    return "\n".join(lines)


def _speeds(run: dict[str, list[float]], name: str) -> list[float]:
    return [plain / ours for plain, ours in zip(run["plain"], run[name], strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the variants of a step.")
    parser.add_argument("--stem", default="imagenet", choices=("imagenet", "cifar"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="of each variant in a round")
    parser.add_argument("--compiled", action="store_true", help="also under torch.compile")
    parser.add_argument("--only", metavar="NAME; NAME", help="these variants, plain among them")
    parser.add_argument("--out", default="variants.jsonl", help="where a job adds its figures")
    parser.add_argument("--table", type=Path, help="print the table of such a file, and no more")
    options = parser.parse_args()
    if options.table:
        print(table(options.table))
    else:
        measure(options)


if __name__ == "__main__":
    main()
