"""A rank of `python -m benchmarks.saving`: steps without a save, and with those of each variant."""

from __future__ import annotations

import itertools
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.ranks.peer_saves import PEERS
from benchmarks.saving import NO_SAVE, rank_options
from mpiddp.bench.result_lines import emit
from mpiddp.bench.rounds import turns
from mpiddp.runtime.job.session import current
from mpiddp.runtime.join import join
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
    options = rank_options(sys.argv[1:])
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
            variants = (NO_SAVE, *options.variants.split(","))
            peers = {name: PEERS[name]() for name in variants if name in PEERS}

            def save(variant: str, number: int) -> None:
                if peer := peers.get(variant):
                    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    peer.save(states, root / f"{variant} {number}")
                elif variant != NO_SAVE:
                    checkpoint.save(checkpoints, state, Progress(number), config, "synthetic")
                if variant == "at-once":
                    wait_for_saves(variant)

            def wait_for_saves(variant: str) -> None:
                if peer := peers.get(variant):
                    peer.wait()
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

            step_s: dict[str, list[list[float]]] = {variant: [] for variant in variants}
            cpu_s: dict[str, list[float]] = {variant: [] for variant in variants}
            first = 0
            # The warm-up round allocates memory and momentum, and selects kernels.
            for number, variant in turns(variants, options.rounds, warmup=1):
                start = time.process_time()
                seconds = block(variant, first)
                wait_for_saves(variant)
                if number > 0:
                    step_s[variant].append(seconds)
                    cpu_s[variant].append(time.process_time() - start)
                if variant in peers and coordinator.world.rank == 0:
                    _remove(root / f"{variant} {first + 1}")
                first += options.steps
            checkpoints.close()
            if coordinator.world.rank == 0:
                shutil.rmtree(root)
                emit({"step_s": step_s, "cpu_s": cpu_s})


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    main()
