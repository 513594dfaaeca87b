"""A training under accelerate that resumes from its newest state: `accelerated.py FOLDER`."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, SAVE_EVERY = 4, 1

folder = Path(sys.argv[1])
accelerator = Accelerator(cpu=True)
torch.manual_seed(1)
x = torch.rand(24, 1)
model: nn.Module = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.1), nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
loader = DataLoader(TensorDataset(x, 2 * x), batch_size=4, shuffle=True)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
done = sorted(int(each.name) for each in folder.iterdir() if (each / "done").exists())
if done:
    accelerator.load_state(str(folder / str(done[-1])))
for epoch in range(done[-1] + 1 if done else 0, EPOCHS):
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
    scheduler.step()
    accelerator.save_state(str(folder / str(epoch)))
    (folder / str(epoch) / "done").touch()
