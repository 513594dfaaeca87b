"""`python -m mpiddp.bench.rank SHARE NAME OPTIONS TRAINING…`: a rank of a job of `mpiddp bench`.

SHARE is the number of ranks that share the threads of a host, OPTIONS are those of the benchmark as JSON, and
TRAINING is options of `mpiddp train`. Rank 0 sends the results.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module

import torch

from mpiddp.bench.figures import emit
from mpiddp.bench.machine import machine
from mpiddp.runtime.join import join
from mpiddp.runtime.script import keep_freed_memory


def main() -> None:
    share, name, options, *training = sys.argv[1:]
    torch.set_num_threads(min(torch.get_num_threads(), max(1, (os.cpu_count() or 1) // int(share))))
    keep_freed_memory(os.environ)
    module = import_module(f"mpiddp.bench.{name}")
    with join() as coordinator:
        world = coordinator.world
        own = machine() if world.local_rank == 0 else None
        hosts = filter(None, coordinator.all_gather_json(own, timeout_s=60.0))
        result = module.rank(module.Options(**json.loads(options)), training)
    if world.rank == 0:
        emit({**result, "hosts": list(hosts)})


if __name__ == "__main__":
    main()
