"""Several process groups in sequence. The second ends with an error that is caught, the last with the job."""

from __future__ import annotations

import atexit
import os

import torch
import torch.distributed as dist

import mpiddp


def print_on_rank(text: str) -> None:
    assert not dist.is_initialized() or "init" in text
    print(f"rank {os.environ['RANK']}: {text}", flush=True)


def total(number: int) -> int:
    tensor = torch.tensor(number)
    dist.all_reduce(tensor)
    return int(tensor)


for turn in range(3):
    try:
        with mpiddp.process_group(backend="gloo"):
            outcome = f"{total(turn) // 2} on all"
            if turn == 1:
                raise RuntimeError("an error on all ranks")
    except RuntimeError as error:
        outcome = str(error)
    print_on_rank(outcome)

# The function that is registered first is called last, after mpiddp has destroyed the group.
atexit.register(print_on_rank, "destroyed")
world = mpiddp.init()
print_on_rank(f"init: {world.backend}, {world.device}, {total(2)}")
