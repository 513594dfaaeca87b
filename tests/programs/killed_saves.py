"""Save at every step, until a timer of each rank kills it at a random moment: killed_saves.py FOLDER.

Two ranks have half of each tensor. All tensors of the checkpoint that they resume must be of its step. Rank 0
prints this step, then each step whose save it has begun.
"""

import os
import random
import signal
import sys
from itertools import count

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import mpiddp

checkpoints = mpiddp.Checkpoints(sys.argv[1], keep=2, every=None)
dist.init_process_group("gloo")
ranks = dist.get_world_size()
saved = checkpoints.resume()
weight = torch.zeros(300, 300)
if ranks > 1:
    weight = distribute_tensor(weight, init_device_mesh("cpu", (ranks,)), [Shard(0)])
module = torch.nn.ParameterDict({"weight": weight})
first = saved.step if saved else 0
if saved is not None:
    saved.load_into(model=module)
    part = module["weight"].to_local() if ranks > 1 else module["weight"]
    assert bool((part == first).all()), "another step's weights"
    assert saved.state["step"] == first
for step in count(first):
    if step > first:
        with torch.no_grad():
            module["weight"].fill_(step)
        checkpoints.save(step, {"model": module.state_dict(), "step": step})
    if dist.get_rank() == 0:
        os.write(1, f"{step}\n".encode())
    if step == first + 3:
        # The same moment on both ranks, or a little later: a rank that is left removes what it has begun.
        moment = random.Random(first).uniform(0.001, 0.05)
        signal.setitimer(signal.ITIMER_REAL, moment + random.choice((0, 0.01)))
