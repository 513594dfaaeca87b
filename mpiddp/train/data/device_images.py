"""Small data sets that stay on the device as one uint8 tensor; a batch is selected by an index.

The device also crops, flips and normalizes a whole batch at once, so a step waits for neither workers
nor copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mpiddp.train.data.arrays import ImageArrays
from mpiddp.train.data.dataset import Batch

MAX_SHIFT = 4  # pixels: He et al. 2015, section 4.2; the border is mirrored, not black


class DeviceImages:
    """Images [N, H, W, C] and labels [N] on `device`; shifted (`max_shift`) and flipped if `augment`."""

    def __init__(
        self,
        arrays: ImageArrays,
        device: torch.device,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        augment: bool,
        max_shift: int = MAX_SHIFT,
        seed: int = 0,
        channels_last: bool = True,
    ) -> None:
        self.num_images, self.height, self.width, channels = arrays.images.shape
        self.augment = augment
        self.max_shift = max_shift
        self.seed = seed
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self._pixels = torch.from_numpy(arrays.images).to(device).view(-1, channels)
        self._labels = torch.from_numpy(arrays.labels).to(device)
        self._scale = 1 / (255 * torch.tensor(std, device=device))
        self._shift = -torch.tensor(mean, device=device) / torch.tensor(std, device=device)
        self._rows = _mirrored(self.height, max_shift).to(device)
        self._columns = _mirrored(self.width, max_shift).to(device)

    def batches(self, indices: Sequence[Tensor], *, epoch: int) -> Iterator[Batch]:
        if not indices:
            return
        device = self._pixels.device
        draws = self._draws(epoch).to(device) if self.augment else None
        # Copy the indices once per epoch, because each copy waits for the device.
        for numbers in torch.cat(list(indices)).to(device).split([len(i) for i in indices]):
            yield self._images(numbers, draws), self._labels[numbers]

    def _draws(self, epoch: int) -> Tensor:
        """Every image's row shift, column shift and flip in this epoch: int64 [num_images, 3]."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        shifts = 2 * self.max_shift + 1
        high = torch.tensor([shifts, shifts, 2])
        uniform = torch.rand(self.num_images, 3, generator=generator, dtype=torch.float64)
        return (uniform * high).long()

    def _images(self, numbers: Tensor, draws: Tensor | None) -> Tensor:
        """The images of `numbers` [N]: float [N, C, H, W], normalized."""
        height, width, device = self.height, self.width, numbers.device
        rows = torch.arange(height, device=device).expand(len(numbers), height)
        columns = torch.arange(width, device=device).expand(len(numbers), width)
        if draws is not None:
            down, right, flip = draws[numbers].unsqueeze(2).unbind(1)
            rows = self._rows[rows + down]
            columns = self._columns[torch.where(flip == 1, width - 1 - columns, columns) + right]
        # The number of each pixel among all pixels. Gathering rows of C bytes gives [N, H, W, C],
        # which already is the channels_last layout.
        pixels = ((numbers * height)[:, None] + rows)[:, :, None] * width + columns[:, None, :]
        images = self._pixels.index_select(0, pixels.view(-1))
        images = images.view(len(numbers), height, width, -1) * self._scale + self._shift
        return images.permute(0, 3, 1, 2).contiguous(memory_format=self.memory_format)


def _mirrored(size: int, pad: int) -> Tensor:
    """Map positions [0, size + 2 · pad) of a padded line to positions of the line that it mirrors."""
    position = torch.arange(-pad, size + pad).abs()
    return torch.where(position < size, position, 2 * (size - 1) - position)
