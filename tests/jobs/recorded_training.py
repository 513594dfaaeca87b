"""`mpiddp train` over numbered images. Each rank records its images, and rank 0 may kill itself.

    mpirun -np 2 python -m tests.jobs.recorded_training FOLDER DIE_AT_STEP OPTIONS…

Writes FOLDER/rank_N.jsonl: a line with the start (step, ranks), then one for each batch.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpiddp.checkpoints.run_dir import RunDir
from mpiddp.runtime.join import join
from mpiddp.runtime.torch.process_group import default_group, device_of
from mpiddp.train import checkpoint
from mpiddp.train.config import resolve_defaults
from mpiddp.train.data.dataset import Batch, Data
from mpiddp.train.engine import build_model
from mpiddp.train.loop import TrainInputs, build_state, train
from mpiddp.train.options import parse
from mpiddp.train.plan import plan_training

NUM_IMAGES = 101
SHAPE = (3, 8, 8)
CONTENTS = f"{NUM_IMAGES} + 0 images of 10 classes"


class Recorded:
    """A source that records the images of each batch, and kills its process at a batch."""

    num_images = NUM_IMAGES

    def __init__(self, file: Path) -> None:
        self._file = file.open("a")
        self._left = -1

    def die_after(self, batches: int) -> None:
        self._left = batches

    def batches(self, indices: Sequence[Tensor], *, epoch: int) -> Iterator[Batch]:
        for numbers in indices:
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self._left -= 1
            self.record({"epoch": epoch, "images": numbers.tolist()})
            yield torch.randn(len(numbers), *SHAPE), numbers % 10

    def record(self, facts: dict[str, Any]) -> None:
        self._file.write(json.dumps(facts) + "\n")
        self._file.flush()


def main(folder: Path, die_at_step: int, argv: list[str]) -> None:
    options = parse(argv)
    run = RunDir(Path(str(options.out)))
    with join() as coordinator:
        rank, ranks = coordinator.world.rank, coordinator.world.world_size
        device = device_of(coordinator.world, "gloo")
        config = resolve_defaults(options, coordinator.world, on_gpu=False, has_bf16=False)
        source = Recorded(folder / f"rank_{rank}.jsonl")
        data = Data("numbered", 10, SHAPE, source, None)
        plan, model = plan_training(config, data, coordinator), build_model(config, data)
        inputs = TrainInputs(config, plan, data, model, coordinator, device, run)
        with default_group(coordinator, "gloo", device, timeout_s=60):
            state, ddp = build_state(inputs)
            with checkpoint.open_checkpoints(run.path, config) as checkpoints:
                start = checkpoint.resume(checkpoints, state, config, CONTENTS, coordinator)
                source.record({"start": start.step, "ranks": ranks})
                if rank == 0 and die_at_step >= 0:  # it has a batch in every step, and saves
                    source.die_after((die_at_step - start.step) * config.grad_accum_steps)
                train(inputs, state, ddp, start, checkpoints)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
