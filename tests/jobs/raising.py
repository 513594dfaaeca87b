"""Rank 1 raises; the others wait for it: one in a collective, the rest asleep.

`raising.py` uses the `with`, `raising.py init` the call; with `exit` besides it is a sys.exit(3).
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
        raise RuntimeError("rank 1 has had enough")
    if world.rank == 0:
        dist.all_reduce(torch.zeros(1))
    time.sleep(600)
