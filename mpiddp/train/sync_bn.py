"""BatchNorm over the images of all ranks, on CPUs as well as on GPUs: `mpiddp train --sync-bn`.

torch's SyncBatchNorm has no kernels for CPUs, and DDP refuses it there. `CpuSyncBatchNorm` computes the same
with plain tensor operations. N ranks then normalize as one process does with the whole batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_EXCEPT_CHANNELS = (0, 2, 3)  # of [N, C, H, W]


def synchronized(model: nn.Module, device: torch.device) -> nn.Module:
    """The model with BatchNorm over all ranks. Parameters, buffers and their names do not change."""
    if device.type != "cpu":
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return converted
    for module in model.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = CpuSyncBatchNorm  # it differs in nothing but forward()
    return model


class CpuSyncBatchNorm(nn.BatchNorm2d):
    """BatchNorm2d that takes its statistics over the images of all ranks while it trains."""

    def forward(self, images: Tensor) -> Tensor:
        """Normalize images [N, C, H, W]. In training a collective: every rank must call it."""
        if not self.training or not dist.is_initialized() or dist.get_world_size() == 1:
            return super().forward(images)
        sum_over_ranks: Any = _SumOverRanks.apply
        values = images.float()
        count = sum_over_ranks(values.new_tensor([values.numel() // values.shape[1]]))
        # Two passes: a difference of sums would lose precision.
        mean = sum_over_ranks(values.sum(_EXCEPT_CHANNELS)) / count
        centred = values - mean.view(1, -1, 1, 1)
        variance = sum_over_ranks(centred.square().sum(_EXCEPT_CHANNELS)) / count
        factor = self.weight * (variance + self.eps).rsqrt()
        with torch.no_grad():
            statistics: Any = self  # a BatchNorm2d of mpiddp's models has them all
            statistics.num_batches_tracked += 1
            statistics.running_mean.lerp_(mean, self.momentum)
            statistics.running_var.lerp_(variance * (count / (count - 1)), self.momentum)
        normalized: Tensor = centred * factor.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)
        return normalized.to(images.dtype)


class _SumOverRanks(torch.autograd.Function):
    """The sum of a tensor over all ranks. The gradient is the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.contiguous().clone()
        dist.all_reduce(total)
        return total

    backward = forward
