"""Two NCCL ranks on one GPU: an all-reduce and the gradients of DistributedDataParallel.

    mpirun -np 2 python -m benchmarks.gpu.ranks.two_ranks

Rank 0 sends the sum and the gradient, or NCCL's refusal.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import mpiddp
from benchmarks.gpu.ranks.shared_gpu import share_gpu
from mpiddp.bench.result_lines import emit
from mpiddp.world import World


def main() -> None:
    share_gpu()
    found: dict[str, Any] = {}
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    try:
        found |= _compute()
    except RuntimeError as error:  # torch.distributed.DistBackendError is one
        found["refusal"] = str(error).strip().splitlines()[-3:]
    if World.from_env().rank == 0:
        emit(found)


def _compute() -> dict[str, Any]:
    with mpiddp.process_group(timeout_s=60) as world:
        values = torch.full((4,), float(world.rank + 1), device=world.device)
        dist.all_reduce(values)
        model = DistributedDataParallel(torch.nn.Linear(4, 1, bias=False).to(world.device))
        model(torch.full((1, 4), float(world.rank), device=world.device)).sum().backward()
        gradient = next(model.parameters()).grad
        assert gradient is not None
        return {
            "backend": world.backend,
            "sum": values[0].item(),
            "gradient": gradient[0, 0].item(),
        }


if __name__ == "__main__":
    main()
