"""A training that knows nothing of mpiddp, and whose rank 1 keeps the others waiting.

    mkfifo PIPE; mpiddp launch -H localhost:3 tests/programs/unmodified.py PIPE
    mpiddp launch -H localhost:2 tests/programs/unmodified.py

Rank 1 waits at step 5 for a pipe that nobody writes to. Without PIPE, it works ten times as long as the
others in every step, and the training does not end.
"""

import sys
import time
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def load(path: Path) -> str:
    return path.read_text(encoding="utf-8")


dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
pipe = Path(sys.argv[1]) if len(sys.argv) > 1 else None
for step in range(10) if pipe else count():
    if pipe and step == 5 and dist.get_rank() == 1:
        load(pipe)
    until = time.thread_time() + (0.0 if pipe else 0.1 if dist.get_rank() == 1 else 0.01)
    while time.thread_time() < until:
        pass
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
