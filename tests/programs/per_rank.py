"""Save a number that is each rank's own and the states of random numbers, or print what a rank resumes."""

import json
import sys

import torch

import mpiddp

world = mpiddp.init(backend="gloo")
torch.manual_seed(100 + world.rank)
checkpoints = mpiddp.Checkpoints(sys.argv[1])
saved = checkpoints.resume()
number = torch.rand(()).item()
if saved is None:
    torch.manual_seed(world.rank)
    checkpoints.save(1, {"shared": 5}, per_rank={"position": world.rank * 10})
else:
    line = json.dumps([world.rank, number, saved.per_rank, saved.world_size, saved.state])
    print(f"{line}\n", end="", flush=True)
