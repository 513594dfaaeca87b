"""Save shards; in the first attempt, rank 1 stops in the middle of the second save: silent_save.py FOLDER."""

import os
import signal
import sys

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import mpiddp

world = mpiddp.init(backend="gloo")
checkpoints = mpiddp.Checkpoints(sys.argv[1], timeout_s=10)
saved = checkpoints.resume()
mesh = init_device_mesh("cpu", (2,))
checkpoints.save(saved.step + 2 if saved else 1, {"small": torch.zeros(2)})
if saved is None:
    checkpoints.save(2, {"weight": distribute_tensor(torch.zeros(40_000_000), mesh, [Shard(0)])})
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
checkpoints.close()
