"""A training of a line, with a global batch that does not depend on the number of ranks.

    mpiddp launch -H node0:1,node1:1 tests/programs/elastic.py FOLDER

FOLDER gets run/ with checkpoints, steps (see `Step`), and weights.json at the end, after which no step
follows. The training ends once FOLDER/finish exists. If FOLDER/broken_HOST exists, the ranks on this host
fail before the first step.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import mpiddp

GLOBAL_BATCH, SIZE, RATE = 12, 4, 0.3


class Step(NamedTuple):
    """A step as rank 0 has seen it."""

    restarts: int
    ranks: int
    number: int
    samples: int  # over all ranks
    loss: float
    at: float  # time.time()


def read_steps(folder: Path) -> list[Step]:
    """The steps so far, in the order in which they were made."""
    file = folder / "steps"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [Step(*json.loads(line)) for line in lines if line.endswith("\n")]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs [GLOBAL_BATCH, SIZE] and targets [GLOBAL_BATCH] of a step."""
    inputs = torch.randn(GLOBAL_BATCH, SIZE, generator=torch.Generator().manual_seed(step))
    return inputs, inputs.sum(1)


def sums_of(weights: torch.Tensor, step: int, rank: int, world_size: int) -> torch.Tensor:
    """The gradient [SIZE], loss, number and inputs of the samples of a rank's share, each summed up."""
    inputs, targets = (each[rank::world_size] for each in batch(step))
    errors = inputs @ weights - targets
    others = torch.stack([(errors**2).sum(), torch.tensor(float(len(errors))), inputs.sum()])
    return torch.cat([inputs.T @ errors, others])


def updated(weights: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    return weights - RATE * sums[:SIZE] / GLOBAL_BATCH


def main(folder: Path) -> int:
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with mpiddp.process_group() as world:
        if (folder / f"broken_{world.hostname}").exists():
            return 3
        mpiddp.announce(resume_args=[], global_batch_size=GLOBAL_BATCH)
        checkpoints = mpiddp.Checkpoints(folder / "run", keep=2, every=20)
        saved = checkpoints.resume()
        weights = saved.state["weights"] if saved else torch.zeros(SIZE)
        # The sum of all inputs. The weights soon converge, and then forget a step that counts twice.
        seen = saved.state["seen"] if saved else 0.0
        step = saved.step if saved else 0
        while True:
            step += 1
            ends = torch.tensor([float(world.rank == 0 and (folder / "finish").exists())])
            sums = torch.cat([sums_of(weights, step, world.rank, world.world_size), ends])
            dist.all_reduce(sums)
            weights = updated(weights, sums)
            seen += float(sums[SIZE + 2])
            if world.rank == 0:
                samples, loss = int(sums[SIZE + 1]), float(sums[SIZE]) / GLOBAL_BATCH
                made = Step(restarts, world.world_size, step, samples, loss, time.time())
                with (folder / "steps").open("a") as file:
                    file.write(f"{json.dumps(made)}\n")
            if checkpoints.due(step):
                checkpoints.save(step, {"weights": weights, "seen": seen})
            if sums[-1]:
                break
            if mpiddp.should_stop():
                return 75
            time.sleep(0.05)
        if world.rank == 0:
            (folder / "weights.json").write_text(json.dumps([step, weights.tolist(), seen]))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
