"""Accuracy over a whole data set: each image on exactly one rank. The ranks add sums, not means."""

from __future__ import annotations

from argparse import Namespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from mpiddp.train.datasets import Dataset
from mpiddp.train.order import share_of
from mpiddp.train.parallel import is_sharded, reshard
from mpiddp.train.step import autocast, averaged_buffers

BATCH_PIXELS = 500 * 32 * 32  # of an evaluation batch, when the training batch is smaller


@torch.no_grad()
def evaluate(
    model: nn.Module, dataset: Dataset, config: Namespace, device: torch.device
) -> tuple[float, float, int]:
    """Score the bare model on all images of the data set. A collective: every rank must call it.

    The batch size does not change the result, because BatchNorm uses its running statistics.

    Returns:
        The fraction of images that it classifies, its mean cross-entropy, and the number of images.
    """
    batch_size = max(config.batch_size, 1, BATCH_PIXELS // config.image_size**2)
    share = share_of(dataset.num_images, dist.get_rank(), dist.get_world_size())
    indices = list(torch.arange(share.start, share.stop).split(batch_size)) if share else []
    num_counted = len(indices)
    if is_sharded(model):  # each pass needs all ranks
        largest_share = -(-dataset.num_images // dist.get_world_size())
        most = -(-largest_share // batch_size)
        indices += [torch.tensor([0])] * (most - num_counted)
    totals = torch.zeros(3, dtype=torch.float64, device=device)  # correct, loss, images
    model.eval()
    with averaged_buffers(model), autocast(config, device):
        for index, (images, labels) in enumerate(dataset.batches(indices, epoch=0)):
            logits = model(images)
            if index < num_counted:
                totals[0] += (logits.argmax(1) == labels).sum()
                totals[1] += F.cross_entropy(logits.float(), labels, reduction="sum")
                totals[2] += len(labels)
    model.train()
    reshard(model)
    dist.all_reduce(totals)
    correct, loss, count = totals.tolist()
    return correct / count, loss / count, int(count)
