"""Measures what saving costs the steps, and prints a table.

    mpiddp launch -H localhost:2 -m benchmarks.saving --rounds 4 --stem imagenet

Blocks of 20 steps with a save after the first one, in a fresh folder of --out, alternate with blocks
that do not save; a third kind writes the checkpoint before it goes on, as a plain torch.save would. All
are in one job, so what else the machine does meets all of them alike. A step lasts until the next one
begins, and so has the snapshot in it; the last of a block does not wait for the writer.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import tempfile
import time
from pathlib import Path
from statistics import mean, median

import torch
import torch.distributed as dist

from mpiddp.runtime.join import join
from mpiddp.runtime.process_group import default_group, device_of
from mpiddp.train.checkpoint import Progress
from mpiddp.train.config import resolve_defaults
from mpiddp.train.engine import backward, build_optimizer, to_device
from mpiddp.train.options import parse
from mpiddp.train.parallel import wrap
from mpiddp.train.resnet import ARCHS
from mpiddp.train.saver import Saver
from mpiddp.train.sharding import Step

STEPS = 20
VARIANTS = ("no save", "in a thread", "at once")


def main() -> None:
    options = _options()
    training = parse([f"--arch={options.arch}", "--batch-size=64", f"--backend={options.backend}"])
    with join() as coordinator:
        device = device_of(coordinator.world, options.backend)
        on_gpu = device.type != "cpu"
        config = resolve_defaults(training, coordinator.world, on_gpu=on_gpu, has_bf16=False)
        with default_group(coordinator, options.backend, device, timeout_s=600):
            torch.manual_seed(0)
            size = options.image_size
            images = torch.randn(64, 3, size, size, device=device).to(
                memory_format=torch.channels_last
            )
            labels = torch.randint(10, (64,), device=device)
            net = ARCHS[options.arch](num_classes=10, stem=options.stem)
            model = to_device(net, config, device)
            optimizer = build_optimizer(model, config)
            scaler = torch.amp.GradScaler(device.type, enabled=False)
            ddp = wrap(model, config, (3, size, size))
            root = Path(coordinator.broadcast_json(tempfile.mkdtemp(dir=options.out)))
            saver = Saver(root, [0], coordinator, model, optimizer, scaler, config, "synthetic")
            step = Step((torch.arange(64),), 64 * coordinator.world.world_size, True)

            def block(variant: str, first: int) -> list[float]:
                """The seconds of each step of a block."""
                dist.barrier()
                marks = [_now(device)]
                for index in range(STEPS):
                    backward(ddp, iter([(images, labels)]), step, scaler, config)
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                    if variant != "no save" and index == 0:
                        saver.save(Progress(first + index))
                    if variant == "at once" and index == 0:
                        saver.finish()
                    marks.append(_now(device))
                return [end - start for start, end in itertools.pairwise(marks)]

            for variant in VARIANTS:  # memory, kernels and the momentum come with the first steps
                block(variant, 0)
                saver.finish()
            seconds: dict[str, list[list[float]]] = {variant: [] for variant in VARIANTS}
            cpu: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
            first = STEPS
            for number in range(options.rounds):
                for variant in (*VARIANTS[number % 3 :], *VARIANTS[: number % 3]):
                    start = time.process_time()
                    seconds[variant].append(block(variant, first))
                    saver.finish()
                    cpu[variant].append(time.process_time() - start)
                    first += STEPS
            if coordinator.world.rank == 0:
                shutil.rmtree(root)
                print(_table(seconds, cpu))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _table(seconds: dict[str, list[list[float]]], cpu: dict[str, list[float]]) -> str:
    """Each variant against the block of the same round that does not save: medians over the rounds."""
    rows = [
        "| variant | mean step ms | ratio | step that saves ms | ratio | CPU s a block, rank 0 |",
        "|---|---|---|---|---|---|",
    ]
    plain = seconds["no save"]
    for variant, blocks in seconds.items():
        means = [mean(block) for block in blocks]
        ratios = [ours / mean(other) for ours, other in zip(means, plain, strict=True)]
        saving = [block[0] for block in blocks]
        jumps = [ours / median(other) for ours, other in zip(saving, plain, strict=True)]
        rows.append(
            f"| {variant} | {median(means) * 1e3:.0f} | {median(ratios):.3f} "
            f"| {median(saving) * 1e3:.0f} | {median(jumps):.2f} | {median(cpu[variant]):.2f} |"
        )
    return "\n".join(rows)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure what saving costs the steps.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--arch", default="resnet18", choices=list(ARCHS))
    parser.add_argument("--stem", default="cifar", choices=("cifar", "imagenet"))
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--backend", default="gloo", choices=("gloo", "nccl"))
    parser.add_argument("--out", default=None, help="where to save; default: the temporary folder")
    return parser.parse_args()


if __name__ == "__main__":
    main()
