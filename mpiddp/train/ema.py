"""An exponential moving average of a model's weights, as torchvision's recipes keep it.

    ema = Ema(model)
    ema.update(model, weight=0.01)     # every few steps
    with ema.lent_to(model): …         # evaluate the average

It has the names of the model's state_dict, and is sharded as the model is. BatchNorm's statistics are
averaged as well. Ranks that update it with equal models hold equal averages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn


class Ema:
    """The average, which begins as a copy of the model."""

    def __init__(self, model: nn.Module) -> None:
        self._average = {name: value.clone() for name, value in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model: nn.Module, weight: float) -> None:
        """Move the average by this part of its distance to the model; with 1 it becomes the model."""
        for name, value in model.state_dict().items():
            average = self._average[name]
            if average.is_floating_point():
                average.lerp_(value, weight)
            else:  # BatchNorm's count of batches
                average.copy_(value)

    @contextlib.contextmanager
    def lent_to(self, model: nn.Module) -> Iterator[None]:
        """Give the model the average while the body runs, and its own weights afterwards."""
        own = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(self._average)
        try:
            yield
        finally:
            model.load_state_dict(own)

    def state_dict(self) -> dict[str, Tensor]:
        return self._average

    @torch.no_grad()
    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        for name, value in self._average.items():
            value.copy_(saved[name])
