"""What all scripts of the series share: the arguments, the data, the model, and one sentence per mistake."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import mpiddp


def parse() -> argparse.Namespace:
    """The arguments of every script: total_epochs, save_every, and the sizes."""
    parser = _Parser()
    add = parser.add_argument
    add("total_epochs", type=int, help="number of epochs")
    add("save_every", type=int, help="epochs between two checkpoints")
    add("--batch-size", "--batch_size", type=int, default=64, help="samples per step, on all ranks")
    add("--samples", type=int, default=2048, help="samples of the data set")
    add("--out", type=Path, help="folder of the checkpoints (default: runs/SCRIPT)")
    options = parser.parse_args()
    for name in ("total_epochs", "save_every", "batch_size"):
        if getattr(options, name) < 1:
            refuse(f"{parser.prog}: {name}: expected 1 or more, not {getattr(options, name)}.")
    options.out = options.out or Path("runs") / Path(parser.prog).stem
    return options


def check(options: argparse.Namespace, ranks: int) -> None:
    """End the script if the data set is too small, or a step cannot be split evenly."""
    if options.samples < 1:
        refuse("the data set is empty. Name a number of samples, 1 or more: --samples 2048")
    if options.samples < options.batch_size:
        refuse(
            f"the data set has {options.samples} samples, fewer than a step takes (--batch-size {options.batch_size})."
        )
    if options.batch_size % ranks:
        refuse(f"--batch-size {options.batch_size} is not divisible by {ranks} ranks.")


def check_folder(folder: Path) -> None:
    """End the script if the folder belongs to a run of another program, and create it."""
    if (folder / "checkpoints").exists() or (folder / "config.json").exists():
        refuse(f"{folder} is the folder of another run. Name another one: --out FOLDER")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"{folder} cannot be created: {error.strerror}. Name another one: --out FOLDER")


def refuse(sentence: str) -> NoReturn:
    """End the script with one sentence and exit code 2. mpiddp prints it once for all ranks."""
    if dist.is_initialized():
        raise mpiddp.UserError(sentence)
    print(sentence, file=sys.stderr)
    sys.exit(2)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        refuse(f"{self.prog}: {message}. See: python {self.prog} --help")


def make_data(samples: int) -> TensorDataset:
    """Made-up samples, the same in every process: 20 numbers, and a function of them to learn."""
    inputs = torch.randn(samples, 20, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def make_model() -> nn.Sequential:
    """A small network with the same weights in every process."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    )
