"""BatchNorm normalizes the images of its own rank, SyncBatchNorm those of all ranks.

mpiddp launch -n 2 examples/pitfalls/batch_norm.py
"""

import torch
import torch.distributed as dist
from torch import nn

import mpiddp
from mpiddp.train.sync_bn import synchronized


def main() -> None:
    with mpiddp.process_group() as world:
        device = torch.device(world.device)
        # 16 images that grow brighter, so those of one rank differ from those of another.
        images = torch.randn(16, 3, 4, 4, generator=torch.Generator().manual_seed(0))
        images = (images + torch.linspace(0, 3, 16).view(16, 1, 1, 1)).to(device)
        expected = nn.BatchNorm2d(3).to(device)(images)  # one process with the whole batch
        layers = {
            "BatchNorm": nn.BatchNorm2d(3),
            # On GPUs this is torch.nn.SyncBatchNorm, which does not support CPUs.
            "SyncBatchNorm": synchronized(nn.BatchNorm2d(3), device),
        }
        for name, layer in layers.items():
            own = layer.to(device)(images.tensor_split(world.world_size)[world.rank])
            difference = (own - expected.tensor_split(world.world_size)[world.rank]).abs().max()
            dist.all_reduce(difference, dist.ReduceOp.MAX)
            if world.rank == 0:
                print(f"{name} differs from one process by up to {difference.item():.6f}")


if __name__ == "__main__":
    main()
