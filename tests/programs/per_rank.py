"""Save a number that is each rank's own and the states of random numbers, or print what a rank resumes."""

import json
import random
import sys

import numpy as np
import torch

import mpiddp

world = mpiddp.init(backend="gloo")


def seed(number: int) -> None:
    for seed_one in (random.seed, np.random.seed, torch.manual_seed):
        seed_one(number)


seed(100 + world.rank)
checkpoints = mpiddp.Checkpoints(sys.argv[1])
saved = checkpoints.resume()
drawn = [random.random(), np.random.rand(), torch.rand(()).item()]
if saved is None:
    seed(world.rank)
    checkpoints.save(1, {"shared": 5}, per_rank={"position": world.rank * 10})
else:
    line = json.dumps([world.rank, drawn, saved.per_rank, saved.world_size, saved.state])
    print(f"{line}\n", end="", flush=True)
