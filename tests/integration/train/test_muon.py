"""Muon and low resolution, without ranks. tests/promises/test_checkpoints.py has it on three ranks.

Tests mpiddp/train/muon.py, mpiddp/train/datasets.py.
python -m pytest tests/integration/train/test_muon.py
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from mpiddp.train.muon import orthogonal
from mpiddp.train.resnet import ARCHS
from mpiddp.train.step import build_optimizer
from tests.support.training import configured


@pytest.mark.parametrize("shape", [(128, 128, 3, 3), (64, 4, 3, 3), (16, 64, 1, 1)])
def test_an_update_moves_the_weights_about_as_far_in_every_direction(
    shape: tuple[int, ...],
) -> None:
    torch.manual_seed(0)
    gradient = torch.randn(shape) * torch.logspace(-1, 1, shape[0]).view(-1, 1, 1, 1)
    update = orthogonal(gradient)
    assert update.shape == shape
    before, after = (
        torch.linalg.svdvals(each.reshape(shape[0], -1)) for each in (gradient, update)
    )
    assert before.max() > 30
    assert after.max() < 1.3
    assert after.max() / after.min() < before.max() / before.min() / 3


def stepped(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int) -> list[Tensor]:
    for step in range(steps):
        torch.manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_filters_keep_their_norm_and_other_parameters_are_those_of_sgd() -> None:
    model = ARCHS["wide_resnet14_2"]().to(memory_format=torch.channels_last)
    other = copy.deepcopy(model)
    names = [name for name, _ in model.named_parameters()]
    by_muon = stepped(build_optimizer(model, configured("--lr=0.1")), model, 3)
    sgd = build_optimizer(other, configured("--lr=0.1", "--optimizer=sgd"))
    by_sgd = stepped(sgd, other, 3)
    for name, muon, plain in zip(names, by_muon, by_sgd, strict=True):
        if muon.ndim == 4 and name != "conv1.weight":
            assert muon.norm() == pytest.approx(len(muon) ** 0.5, rel=0.1)
        else:
            torch.testing.assert_close(muon, plain)
