"""A rank that forms the process group, uses it and leaves it, twice. Rank 0 sends what all ranks found."""

from __future__ import annotations

import functools
import os
import time
from typing import Any

import torch
import torch.distributed as dist

import mpiddp
from mpiddp.bench.result_lines import emit


def main() -> None:
    calls = _calls()
    found = [_form_and_leave(), _form_and_leave()]
    if os.environ["RANK"] == "0":
        emit({"groups": found, "calls": calls, "destroyed": not dist.is_initialized()})


def _calls() -> list[str]:
    """A list that gets the name of each call that chooses the device or forms a group, in their order."""
    calls: list[str] = []

    def note(module: Any, name: str) -> None:
        function = getattr(module, name)

        @functools.wraps(function)
        def noted(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return function(*args, **kwargs)

        setattr(module, name, noted)

    note(torch.accelerator, "set_device_index")
    note(dist, "init_process_group")
    return calls


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
