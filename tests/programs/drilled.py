"""A training that resumes exactly, or forgets something: `drilled.py FOLDER [DEFECT]`.

The drill has to tell where it differs (tests/promises/test_doctor.py).
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, SAVE_EVERY = 24, 3

folder, defect = Path(sys.argv[1]), (sys.argv[2:] or [""])[0]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
newest = folder / "newest.pt"
wants_stop = False


def save(step: int) -> None:
    file = newest.with_suffix(".tmp")
    if rank == 0 or defect == "all ranks":
        torch.save({name: part.state_dict() for name, part in parts.items()} | {"step": step}, file)
    if rank == 0:
        file.replace(newest)


def load() -> int:
    if not newest.exists():
        return 0
    saved = torch.load(newest)
    for name, part in parts.items():
        if name != defect:
            part.load_state_dict(saved[name])
    if defect == "scheduler":
        optimizer.param_groups[0]["lr"] = 0.01
    return int(saved["step"])


def request(number: int, frame: object) -> None:
    global wants_stop
    wants_stop = True


dist.init_process_group("gloo")
signal.signal(signal.SIGTERM, request)
torch.manual_seed(os.getpid() if defect == "random" else 0)
net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 1))
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
parts: dict[str, Any] = {"model": net, "optimizer": optimizer, "scheduler": scheduler}
for step in range(load() + 1, STEPS + 1):
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step * world + rank))
    loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    stops = torch.tensor(int(wants_stop))
    dist.all_reduce(stops)
    if step % SAVE_EVERY == 0 or stops:
        save(step)
    if stops:
        sys.exit(75)
dist.destroy_process_group()
