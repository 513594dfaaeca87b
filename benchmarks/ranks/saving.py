"""A rank of `python -m benchmarks.saving`: steps without a save, and with those of each variant."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.saving import AT_ONCE, NO_SAVE, VARIANTS, Options
from mpiddp.bench.figures import emit, turns
from mpiddp.runtime.job.session import current
from mpiddp.runtime.start.join import join
from mpiddp.runtime.torch.process_group import default_group, device_of
from mpiddp.train import checkpoint
from mpiddp.train.checkpoint import Progress
from mpiddp.train.config import resolve_defaults
from mpiddp.train.copies import find_copies
from mpiddp.train.engine import TrainState, backward, build_optimizer, to_device
from mpiddp.train.options import parse
from mpiddp.train.order import Step
from mpiddp.train.parallel import wrap
from mpiddp.train.resnet import ARCHS


def main() -> None:
    options = Options(**json.loads(sys.argv[1]))
    training = parse(
        [
            *(
                f"--arch={options.arch}",
                f"--batch-size={options.batch_size}",
                f"--backend={options.backend}",
            ),
            f"--parallel={options.parallel}",
        ]
    )
    with join() as coordinator:
        device = device_of(coordinator.world, options.backend)
        on_gpu = device.type != "cpu"
        config = resolve_defaults(training, coordinator.world, on_gpu=on_gpu, has_bf16=False)
        with default_group(coordinator, options.backend, device, timeout_s=600):
            torch.manual_seed(0)
            size = options.image_size
            num_images = options.batch_size
            images = torch.randn(num_images, 3, size, size, device=device).to(
                memory_format=torch.channels_last
            )
            labels = torch.randint(10, (num_images,), device=device)
            net = ARCHS[options.arch](num_classes=10, stem=options.stem)
            model = to_device(net, config, device)
            copies = find_copies(config, coordinator)
            ddp = wrap(model, config, (3, size, size), copies)
            optimizer = build_optimizer(model, config)
            scaler = torch.amp.GradScaler(device.type, enabled=False)
            root = Path(coordinator.broadcast_json(tempfile.mkdtemp(dir=options.folder)))
            state = TrainState(model, optimizer, scaler)
            checkpoints = checkpoint.open_checkpoints(root, config)
            checkpoints.resume()
            global_batch = num_images * coordinator.world.world_size
            step = Step((torch.arange(num_images),), global_batch, True)

            def save(variant: str, number: int) -> None:
                if variant != NO_SAVE:
                    checkpoint.save(checkpoints, state, Progress(number), config, "synthetic")
                if variant == AT_ONCE:
                    wait_for_saves()

            def wait_for_saves() -> None:
                current().wait_for_saves()
                dist.barrier()

            def block(variant: str, first: int) -> list[float]:
                """Run a block and return the seconds of each step."""
                dist.barrier()
                marks = [_now(device)]
                for index in range(options.steps):
                    backward(ddp, iter([(images, labels)]), step, scaler, config)
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                    if index == 0:
                        save(variant, first + 1)
                    marks.append(_now(device))
                return [end - start for start, end in itertools.pairwise(marks)]

            step_s: dict[str, list[list[float]]] = {variant: [] for variant in VARIANTS}
            cpu_s: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
            first = 0
            # The warm-up round allocates memory and momentum, and selects kernels.
            for number, variant in turns(VARIANTS, options.rounds, warmup=1):
                start = time.process_time()
                seconds = block(variant, first)
                wait_for_saves()
                if number > 0:
                    step_s[variant].append(seconds)
                    cpu_s[variant].append(time.process_time() - start)
                first += options.steps
            checkpoints.close()
            if coordinator.world.rank == 0:
                shutil.rmtree(root)
                emit({"step_s": step_s, "cpu_s": cpu_s})


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    main()
