"""A training under PyTorch Lightning on two hosts: lightning_training.py FOLDER."""

import sys
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(LightningModule):
    """One linear layer that learns y = 2x, with a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        loss: Tensor = nn.functional.mse_loss(self.layer(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.manual_seed(1)
    x = torch.rand(48, 1)
    loader = DataLoader(TensorDataset(x, 2 * x), batch_size=4, num_workers=1)
    trainer = Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=1,
        num_nodes=2,
        max_epochs=5,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(dirpath=folder, filename="saved-{epoch}", save_last=True)],
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(Regression(), loader)
    loss = float(trainer.callback_metrics["loss"])
    where = f"rank {trainer.global_rank} of {trainer.world_size}"
    print(f"{where}: loss {loss:.3f}\n", end="", flush=True)
