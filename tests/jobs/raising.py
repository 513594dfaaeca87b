"""Rank 1 raises while rank 0 waits for it in a collective, and the other ranks sleep.

`raising.py` uses `mpiddp.process_group`, `raising.py init` uses `mpiddp.init`. With the argument `exit`,
rank 1 calls sys.exit(3) instead.
"""

from __future__ import annotations

import contextlib
import sys
import time

import torch
import torch.distributed as dist

import mpiddp

group = contextlib.nullcontext(mpiddp.init()) if "init" in sys.argv else mpiddp.process_group()
with group as world:
    if world.rank == 1:
        print(f"raising at {time.time()}", flush=True)
        if "exit" in sys.argv:
            sys.exit(3)
        raise RuntimeError("rank 1 fails on purpose")
    if world.rank == 0:
        dist.all_reduce(torch.zeros(1))
    time.sleep(600)
