"""A training that resumes exactly, or with one defect: `script.py FOLDER [DEFECT]`.

Each defect is a few lines. The drill must name it (tests/promises/test_doctor.py).
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
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, SAMPLES, BATCH, SAVE_EVERY = 3, 48, 4, 3
WARMS_UP = 5

folder, defect = Path(sys.argv[1]), (sys.argv[2:] or [""])[0]
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
newest = folder / "newest.pt"
wants_stop = False
progress: dict[str, Any] = {}


class Note:
    """What only an unpickler that may run code can read."""


def build() -> nn.Module:
    torch.manual_seed(1)
    dropout = nn.Dropout(0.2)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), dropout, nn.Linear(8, 1))


def save() -> None:
    states: list[Any] = [torch.get_rng_state()] * world
    if world > 1:
        dist.all_gather_object(states, torch.get_rng_state())
    if defect == "never" or (rank != 0 and defect != "all ranks"):
        return
    state = {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "random": states,
        **progress,
    }
    if defect == "weights_only":
        state["note"] = Note()
    if defect == "buffers":
        state["model"] = dict(net.named_parameters())
    if defect in ("all ranks", "non-atomic"):
        torch.save(state, newest)
        return
    torch.save(state, beside := newest.with_suffix(".tmp"))
    beside.replace(newest)


def load() -> dict[str, Any] | None:
    if not newest.exists() or (defect == "rank 0 alone" and rank != 0):
        return None
    saved: dict[str, Any] = torch.load(newest, weights_only=True)
    net.load_state_dict(
        saved["model"], strict=defect != "buffers", assign=defect == "moved optimizer"
    )
    optimizer.load_state_dict(saved["optimizer"])
    if defect not in ("scheduler", "warm-up"):
        scheduler.load_state_dict(saved["scheduler"])
    if defect == "warm-up":
        for group in optimizer.param_groups:
            group["lr"] = scheduler.get_last_lr()[0]
    if defect == "scheduler":
        optimizer.param_groups[0]["lr"] = 0.1
    if defect != "random":
        torch.set_rng_state(saved["random"][rank % len(saved["random"])])
    return saved


def request(number: int, frame: object) -> None:
    global wants_stop
    wants_stop = True
    if defect == "save in handler":
        save()
        sys.exit(75)


def in_worker(number: int) -> None:
    if defect == "worker":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(1))


def rate(step: int) -> float:
    return (step + 1) / WARMS_UP if step < WARMS_UP and defect == "warm-up" else 0.95**step


if world > 1:
    dist.init_process_group("gloo")
signal.signal(signal.SIGTERM, request)
torch.manual_seed(0)
inputs = torch.randn(SAMPLES, 4)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
net = build()
model = DistributedDataParallel(net) if world > 1 else net
optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
sampler: DistributedSampler[Any] = DistributedSampler(data, world, rank, shuffle=True, seed=5)
torch.manual_seed(10 + rank)
saved = load()
first_epoch, first_batch = (saved["epoch"], saved["batch"]) if saved else (0, 0)
if defect == "position":
    first_batch = 0
step = saved["step"] if saved else 0
for epoch in range(first_epoch, EPOCHS):
    sampler.set_epoch(0 if defect == "set_epoch" and saved and epoch == first_epoch else epoch)
    loader = DataLoader(
        data,
        BATCH,
        sampler=list(sampler)[first_batch * BATCH :],
        num_workers=int(defect == "worker"),
        worker_init_fn=in_worker,
        generator=torch.Generator(),
    )
    batches = SAMPLES // world // BATCH
    for batch, (x, y) in enumerate(loader, first_batch + 1):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        step += 1
        progress = {"epoch": epoch + batch // batches, "batch": batch % batches, "step": step}
        if step % SAVE_EVERY == 0 or wants_stop:
            save()
        if wants_stop:
            sys.exit(75)
    first_batch = 0
if world > 1:
    dist.destroy_process_group()
