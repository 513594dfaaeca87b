"""A training that knows nothing of mpiddp. Rank 1 works ten times as long as the others in every step.

mpiddp launch -H localhost:2 tests/programs/straggler.py
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    until = time.thread_time() + (0.1 if dist.get_rank() == 1 else 0.01)
    while time.thread_time() < until:
        pass
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
