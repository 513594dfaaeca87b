"""A training under PyTorch Lightning: `lightning_training.py FOLDER DEVICES NODES`."""

from __future__ import annotations

import sys

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(LightningModule):
    """One linear layer that learns y = 2x."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        loss: Tensor = nn.functional.mse_loss(self.layer(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    folder, devices, nodes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.manual_seed(1)
    x = torch.rand(64, 1)
    loader = DataLoader(TensorDataset(x, 2 * x), batch_size=4, num_workers=2)
    trainer = Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=devices,
        num_nodes=nodes,
        max_epochs=5,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(dirpath=folder, filename="saved-{epoch}")],
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(Regression(), loader)
    loss = float(trainer.callback_metrics["loss"])
    print(
        f"rank {trainer.global_rank} of {trainer.world_size}: loss {loss:.3f}\n", end="", flush=True
    )
