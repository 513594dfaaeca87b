"""The small real job of `mpiddp doctor`: one rank on each host, an all-reduce with a known result.

mpiddp launch -H node1:1,node2:1 -m mpiddp.doctor.trial_job
"""

from __future__ import annotations

import json
import socket
import time
from typing import Any

PROOF = "mpiddp-doctor "
COUNT = 4 << 20  # floats: 16 MB


def main() -> None:
    """Sum a tensor over all ranks. Rank 0 prints the host, the result and the time of each rank."""
    import torch
    import torch.distributed as dist

    from mpiddp.runtime.torch.process_group import process_group

    with process_group() as world:
        size = world.world_size
        values = torch.full((COUNT,), float(world.rank + 1), device=world.device)
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(values)
        wrong = int((values != size * (size + 1) / 2).sum())
        facts = {
            "hostname": socket.gethostname(),
            "wrong": wrong,
            "seconds": time.perf_counter() - began,
        }
        ranks: list[Any] = [None] * size
        dist.all_gather_object(ranks, facts)
        if world.rank == 0:
            print(PROOF + json.dumps(ranks), flush=True)


if __name__ == "__main__":
    main()
