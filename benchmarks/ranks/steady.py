"""A training with mpiddp.Checkpoints and a DataLoader's worker, as long as a fault needs to hit it.

    mpiddp launch -H localhost:2 benchmarks/ranks/steady.py FOLDER STEPS

FOLDER then has checkpoints/, metrics.jsonl with a line for each step, and `weights`, whose text is equal
only if every bit of the weights is.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import mpiddp

SIZE, BATCH = 64, 8
SAVE_EVERY = 5
STEP_S = 0.05


def main(folder: Path, steps: int) -> None:
    with mpiddp.process_group(backend="gloo") as world:
        weights, momentum = torch.zeros(SIZE), torch.zeros(SIZE)
        checkpoints = mpiddp.Checkpoints(folder, keep=2, every=SAVE_EVERY)
        saved = checkpoints.resume()
        if saved:
            weights, momentum = saved.state["weights"], saved.state["momentum"]
        first = saved.step + 1 if saved else 1
        everything = (steps, world.world_size, BATCH, SIZE + 1)
        samples = torch.randn(everything, generator=torch.Generator().manual_seed(0))
        of_rank: Any = samples[first - 1 :, world.rank].flatten(0, 1)
        for step, batch in enumerate(DataLoader(of_rank, BATCH, num_workers=1), first):
            inputs, targets = batch[:, :SIZE], batch[:, SIZE]
            gradient = inputs.T @ (inputs @ weights - targets) / BATCH
            dist.all_reduce(gradient)
            momentum = 0.9 * momentum + gradient / world.world_size
            weights = weights - 0.01 * momentum
            if world.rank == 0:
                mpiddp.log_metrics(step=step, loss=float(gradient.norm()))
            if checkpoints.due(step) or step == steps:
                checkpoints.save(step, {"weights": weights, "momentum": momentum})
            if step < steps and mpiddp.should_stop():
                return
            time.sleep(STEP_S)
        if world.rank == 0:
            (folder / "weights").write_text(weights.numpy().tobytes().hex(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
