"""A training as the DDP tutorials have it: a snapshot each epoch, written in place: `snapshot.py FOLDER`.

SGD without momentum has no state, so the weights and the number of epochs are enough.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 6

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.rand(48, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))
sampler: DistributedSampler[torch.Tensor] = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = nn.Linear(4, 1)
snapshot, epochs_run = Path(sys.argv[1], "snapshot.pt"), 0
if snapshot.exists():
    found = torch.load(snapshot, weights_only=True)
    model.load_state_dict(found["model"])
    epochs_run = found["epochs_run"]
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
for epoch in range(epochs_run, EPOCHS):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(inputs), targets).backward()
        optimizer.step()
    if dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "epochs_run": epoch + 1}, snapshot)
dist.destroy_process_group()
