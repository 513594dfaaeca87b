"""Ranks that add up the numbers of each step's samples, of which each rank has its share.

    mpiddp launch -H node0:1,node1:1 tests/programs/elastic.py FOLDER

FOLDER gets run/ with checkpoints, and steps, in which rank 0 writes a line for each step: the restarts, the
ranks, its number, and its samples over all ranks. The job ends once FOLDER/finish exists, and fails if any
step has not counted exactly once.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import mpiddp

GLOBAL_BATCH = 12


def samples_of(step: int) -> range:
    return range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)


def following(state: int, sum_of_samples: int) -> int:
    """The state after a step. It depends on the order of the steps, and on how often each of them counted."""
    return (31 * state + sum_of_samples) % 1_000_003


folder = Path(sys.argv[1])
world = mpiddp.init()
mpiddp.announce(resume_args=[], global_batch_size=GLOBAL_BATCH)
checkpoints = mpiddp.Checkpoints(folder / "run", keep=2, every=20)
saved = checkpoints.resume()
step, state = (saved.step, saved.state["state"]) if saved else (0, 0)
ends = False
while not ends:
    step += 1
    share = samples_of(step)[world.rank :: world.world_size]
    sums = torch.tensor([sum(share), len(share), world.rank == 0 and (folder / "finish").exists()])
    dist.all_reduce(sums)
    total, samples, ends = sums.tolist()
    state = following(state, total)
    if world.rank == 0:
        with (folder / "steps").open("a") as file:
            restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
            file.write(f"[{restarts}, {world.world_size}, {step}, {samples}]\n")
    if checkpoints.due(step):
        checkpoints.save(step, {"state": state})
    if not ends and mpiddp.should_stop():
        sys.exit(75)
    time.sleep(0.05)
expected = 0
for number in range(1, step + 1):
    expected = following(expected, sum(samples_of(number)))
assert state == expected
