"""BatchNorm normalizes the images of its own rank, SyncBatchNorm those of all ranks.

mpiddp launch -n 2 examples/pitfalls/batch_norm.py
"""

import torch
import torch.distributed as dist
from torch import nn

import mpiddp


class SumOverRanks(torch.autograd.Function):
    """dist.all_reduce, whose gradient is one too."""

    @staticmethod
    def forward(context, values):
        dist.all_reduce(values)
        return values

    @staticmethod
    def backward(context, gradients):
        return SumOverRanks.forward(context, gradients.clone())


class SyncBatchNorm(nn.BatchNorm2d):
    """torch.nn.SyncBatchNorm, which has no kernels for CPUs, in a few lines."""

    def forward(self, images):
        sums = [images.new_tensor(images[:, 0].numel()).expand(images.shape[1])]
        sums += [images.sum((0, 2, 3)), images.square().sum((0, 2, 3))]
        count, total, squares = SumOverRanks.apply(torch.stack(sums))
        mean = total / count
        variance = squares / count - mean.square()
        with torch.no_grad():
            unbiased = variance * count / (count - 1)
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(unbiased, self.momentum)
            self.num_batches_tracked += 1
        scale = self.weight * (variance + self.eps).rsqrt()
        return images * scale.view(-1, 1, 1) + (self.bias - mean * scale).view(-1, 1, 1)


def main() -> None:
    with mpiddp.process_group() as world:
        device = torch.device(world.device)
        # 16 images that grow brighter, so those of one rank differ from those of another.
        images = torch.randn(16, 3, 4, 4, generator=torch.Generator().manual_seed(0))
        images = (images + torch.linspace(0, 3, 16).view(16, 1, 1, 1)).to(device)
        expected = nn.BatchNorm2d(3).to(device)(images)  # one process with the whole batch
        layers = {"BatchNorm": nn.BatchNorm2d(3), "SyncBatchNorm": SyncBatchNorm(3)}
        for name, layer in layers.items():
            local = layer.to(device)(images.tensor_split(world.world_size)[world.rank])
            difference = (local - expected.tensor_split(world.world_size)[world.rank]).abs().max()
            dist.all_reduce(difference, dist.ReduceOp.MAX)
            if world.rank == 0:
                print(f"{name} differs from one process by up to {difference.item():.6f}")


if __name__ == "__main__":
    main()
