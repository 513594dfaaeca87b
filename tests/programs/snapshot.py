"""A trainer in the style of the DDP tutorials: a snapshot each epoch, written in place: `snapshot.py FOLDER`.

SGD without momentum has no state, so the weights and the number of epochs are enough.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 6


class Trainer:
    """Trains a model on the batches of a loader, and continues from a snapshot if there is one."""

    def __init__(self, model: nn.Module, loader: DataLoader[Any], snapshot: Path) -> None:
        self.rank = int(os.environ["RANK"])
        self.loader, self.snapshot = loader, snapshot
        self.epochs_run = 0
        if snapshot.exists():
            found = torch.load(snapshot, weights_only=True)
            model.load_state_dict(found["model"])
            self.epochs_run = found["epochs_run"]
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def train(self, epochs: int) -> None:
        for epoch in range(self.epochs_run, epochs):
            assert isinstance(self.loader.sampler, DistributedSampler)
            self.loader.sampler.set_epoch(epoch)
            for inputs, targets in self.loader:
                self._run_batch(inputs, targets)
            if self.rank == 0:
                state = self.model.module.state_dict()
                torch.save({"model": state, "epochs_run": epoch + 1}, self.snapshot)

    def _run_batch(self, inputs: Tensor, targets: Tensor) -> None:
        self.optimizer.zero_grad()
        nn.functional.mse_loss(self.model(inputs), targets).backward()
        self.optimizer.step()


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.rand(48, 4)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    Trainer(nn.Linear(4, 1), loader, folder / "snapshot.pt").train(EPOCHS)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
