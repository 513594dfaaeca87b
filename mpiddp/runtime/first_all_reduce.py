"""With -v: the time from the command to the end of a script's first all-reduce.

The script calls torch's init_process_group itself and knows nothing of mpiddp, so that function is
replaced until its first call. torch 2.13 has no hook for it; tests/test_still_needed.py fails once
torch has one.
"""

from __future__ import annotations

import functools
import os
import time
from typing import Any

import torch
import torch.distributed as dist

from mpiddp.errors import UserError
from mpiddp.protocol.variables import LAUNCHED_AT, VERBOSE
from mpiddp.text import shown
from mpiddp.world import World


def time_first_all_reduce(world: World) -> None:
    """Run one all-reduce in the first process group before anything else, if the launcher runs with -v.

    Rank 0 then prints the seconds from the launcher's start to the end of that all-reduce.

    Raises:
        UserError: the launcher's start is not a time.
    """
    text = os.environ.get(LAUNCHED_AT)
    if text is None or not os.environ.get(VERBOSE):
        return
    start = _launched_at(text)
    init_process_group = dist.init_process_group

    @functools.wraps(init_process_group)
    def init_and_time(*args: Any, **kwargs: Any) -> None:
        init_process_group(*args, **kwargs)
        # A script that imported the function by name reaches this wrapper more than once.
        if dist.init_process_group is init_process_group:
            return
        dist.init_process_group = init_process_group
        _all_reduce(world)
        if dist.get_rank() == 0:
            seconds = time.time() - start
            # Print it: the script's logging.config may have switched the log off.
            print(f"first all-reduce {seconds:.2f} s after the command", flush=True)

    dist.init_process_group = init_and_time


def _launched_at(text: str) -> float:
    try:
        start = float(text)
    except ValueError:
        start = -1.0
    if not 0 <= start < 1e11:
        raise UserError(f'{LAUNCHED_AT}="{shown(text)}" is not a time in seconds. Unset it.')
    return start


def _all_reduce(world: World) -> None:
    device = torch.device("cpu")
    gpu = torch.accelerator.current_accelerator()
    if gpu is not None and "cpu:" not in dist.get_backend_config():  # "cuda:nccl"
        assert world.local_rank is not None, "the ranks have joined"
        all_visible = world.local_rank < torch.accelerator.device_count()
        index = world.local_rank if all_visible else torch.accelerator.current_device_index()
        device = torch.device(gpu.type, index)
    one = torch.ones(1, device=device)
    dist.all_reduce(one)
    assert one.item() == dist.get_world_size()
