"""A script that shows the local ranks of a process."""

from __future__ import annotations

SHOW = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
threads = torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])
print("shown", *(os.environ[name] for name in names), int(total), threads, flush=True)
dist.destroy_process_group()
"""
