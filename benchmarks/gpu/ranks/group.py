"""A rank that forms the process group, uses it and leaves it, twice. Rank 0 sends what all ranks found."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist

import mpiddp
from mpiddp.bench.result_lines import emit


def main() -> None:
    found = [_form_and_leave(), _form_and_leave()]
    if os.environ["RANK"] == "0":
        emit({"groups": found, "destroyed": not dist.is_initialized()})


def _form_and_leave() -> list[dict[str, Any]]:
    """What each rank finds: [world_size]."""
    since = time.monotonic()
    with mpiddp.process_group() as world:
        formed_s = time.monotonic() - since
        is_cuda = str(world.device).startswith("cuda")
        one = torch.ones(1, device=world.device)
        dist.all_reduce(one)
        total = one.item()
        own = {
            "rank": world.rank,
            "world_size": world.world_size,
            "backend": world.backend,
            "device": str(world.device),
            "current_device": torch.cuda.current_device() if is_cuda else None,
            "bound_device": str(getattr(dist.group.WORLD, "bound_device_id", None)),
            "visible_gpus": torch.cuda.device_count(),
            "sum": total,
            "formed_s": round(formed_s, 3),
            "first_all_reduce_s": round(time.monotonic() - since - formed_s, 3),
        }
        everyone: list[Any] = [None] * world.world_size
        dist.all_gather_object(everyone, own)  # NCCL carries pickles on the GPU
    return everyone


if __name__ == "__main__":
    main()
