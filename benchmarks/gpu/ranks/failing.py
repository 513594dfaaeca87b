"""Ranks that share GPU 0 and sum without end, until the last one fails: `failing.py raises`, or `dies`."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import mpiddp
from benchmarks.gpu.ranks.shared_gpu import share_gpu

FAILS_AT = 20  # steps
NAME = "planned failure"


def main(how: str) -> None:
    share_gpu()
    with mpiddp.process_group(timeout_s=300) as world:
        numbers = torch.ones(1 << 20, device=world.device)
        step = 0
        while True:
            if step == FAILS_AT and world.rank == world.world_size - 1:
                print(f"{NAME} at {time.time()}", flush=True)
                if how == "raises":
                    raise ValueError(NAME)
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(numbers, dist.ReduceOp.MAX)
            assert numbers.sum().item() == 1 << 20
            step += 1


if __name__ == "__main__":
    main(sys.argv[1])
