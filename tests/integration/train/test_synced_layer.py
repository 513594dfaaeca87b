"""The layer of --sync-bn on one rank, and on GPUs.

Tests mpiddp/train/sync_bn.py.
python -m pytest tests/integration/train/test_synced_layer.py
"""

from __future__ import annotations

import torch
from torch import nn

from mpiddp.train.sync_bn import CpuSyncBatchNorm, synchronized


def test_the_statistics_and_gradients_are_those_of_torch_on_one_rank() -> None:
    """Without a process group the layer is BatchNorm2d."""
    torch.manual_seed(0)
    images = torch.randn(4, 3, 5, 5)
    plain, own = nn.BatchNorm2d(3), synchronized(nn.BatchNorm2d(3), torch.device("cpu"))
    assert type(own) is CpuSyncBatchNorm
    assert torch.equal(plain(images), own(images))
    assert list(own.state_dict()) == list(plain.state_dict())


def test_gpus_get_the_layer_of_torch() -> None:
    model = synchronized(nn.Sequential(nn.BatchNorm2d(3)), torch.device("cuda", 0))
    assert type(model[0]) is nn.SyncBatchNorm
