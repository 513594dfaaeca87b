"""A training that knows nothing of mpiddp. Rank 1 waits at step 5 for a pipe that nobody writes to.

mkfifo PIPE; mpiddp launch -H localhost:3 tests/programs/unmodified.py PIPE
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def load(path: Path) -> str:
    return path.read_text()


dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    if step == 5 and dist.get_rank() == 1:
        load(Path(sys.argv[1]))
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
