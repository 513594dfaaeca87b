"""BatchNorm over the images of all ranks, on CPUs as well as on GPUs.

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
    """The model with BatchNorm over all ranks. Parameters, buffers and their names stay the same."""
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
        is_distributed = dist.is_available() and dist.is_initialized()
        if not self.training or not is_distributed or dist.get_world_size() == 1:
            return super().forward(images)
        output, mean, variance, count = _Normalize.apply(  # type: ignore[no-untyped-call]
            images, self.weight, self.bias, self.eps
        )
        with torch.no_grad():
            assert self.running_mean is not None
            assert self.running_var is not None
            assert self.num_batches_tracked is not None
            assert self.momentum is not None
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * (count / (count - 1)), self.momentum)
        result: Tensor = output
        return result


class _Normalize(torch.autograd.Function):
    """The normalization, and its gradients by Ioffe and Szegedy 2015, with sums over all ranks."""

    @staticmethod
    def forward(
        ctx: Any, images: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the output, and of each channel over all ranks: mean [C], biased variance [C], count."""
        values = images.float()
        mean, variance, count = _statistics_of_all_ranks(values)
        if count <= 1:
            raise ValueError("BatchNorm needs more than one value per channel over all ranks.")
        inverse = (variance + eps).rsqrt()
        normal = (values - _per_channel(mean)) * _per_channel(inverse)
        ctx.save_for_backward(normal, weight, inverse, count)
        ctx.mark_non_differentiable(mean, variance, count)
        output = normal * _per_channel(weight) + _per_channel(bias)
        return output.to(images.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        normal, weight, inverse, count = ctx.saved_tensors
        gradient = gradients[0].float()
        # DDP averages these two over the ranks, as those of every other parameter.
        bias_gradient = gradient.sum(_EXCEPT_CHANNELS)
        weight_gradient = (gradient * normal).sum(_EXCEPT_CHANNELS)
        sums = torch.cat([bias_gradient, weight_gradient])
        dist.all_reduce(sums)
        mean, product = (sums / count).chunk(2)
        centred = gradient - _per_channel(mean) - normal * _per_channel(product)
        images_gradient = centred * _per_channel(weight * inverse)
        return images_gradient.to(gradients[0].dtype), weight_gradient, bias_gradient, None


def _statistics_of_all_ranks(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The mean [C], the biased variance [C] and the number of values per channel, over all ranks.

    Each rank's own are combined as by Chan, Golub and LeVeque 1983, which keeps the precision that a
    difference of sums would lose.
    """
    variance, mean = torch.var_mean(values, _EXCEPT_CHANNELS, correction=0)
    own = torch.cat([mean, variance, mean.new_tensor([values.numel() // len(mean)])])
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    means, variances, counts = torch.stack(gathered).split([len(mean), len(mean), 1], dim=1)
    count = counts.sum()
    mean = (counts * means).sum(0) / count
    variance = (counts * (variances + (means - mean).square())).sum(0) / count
    return mean, variance, count


def _per_channel(values: Tensor) -> Tensor:
    """[C] to [1, C, 1, 1]"""
    return values.view(1, -1, 1, 1)
