"""ResNets in plain torch, for ImageNet and CIFAR, with torchvision's names and shapes.

So torchvision's checkpoints load. As there, the stride of a bottleneck is on its 3×3 convolution.

    model = mpiddp.train.resnet.ARCHS["resnet18"](num_classes=10, stem="cifar")
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["ARCHS", "ResNet", "WhitenedResNet"]

STEMS = {"imagenet": (7, 2), "cifar": (3, 1)}  # size and stride of the convolution
_LEAST_VARIANCE = 5e-4  # of a component, as in airbench: the smallest ones are noise


def _conv(in_channels: int, out_channels: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, size, stride, padding=size // 2, bias=False)


class BasicBlock(nn.Module):
    """Two 3×3 convolutions: [N, C_in, H, W] to [N, width, H / stride, W / stride]."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int, shortcut: nn.Module | None):
        super().__init__()
        self.conv1 = _conv(in_channels, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = shortcut

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        x = self.bn2(self.conv2(x))
        return F.relu(x + identity, inplace=True)


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions: [N, C_in, H, W] to [N, 4 · width, H / stride, W / stride]."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int, shortcut: nn.Module | None):
        super().__init__()
        self.conv1 = _conv(in_channels, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _conv(width, width * self.expansion, 1)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.downsample = shortcut

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        x = F.relu(self.bn2(self.conv2(x)), inplace=True)
        x = self.bn3(self.conv3(x))
        return F.relu(x + identity, inplace=True)


class PadShortcut(nn.Module):
    """Option A of He et al.: take every second pixel, and fill the new channels with zeros."""

    def __init__(self, in_channels: int, out_channels: int, stride: int):
        super().__init__()
        self.stride, new = stride, out_channels - in_channels
        self.padding = (0, 0, 0, 0, new // 2, new - new // 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], self.padding)


def _projection(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    return nn.Sequential(_conv(in_channels, out_channels, 1, stride), nn.BatchNorm2d(out_channels))


@dataclass(frozen=True)
class Architecture:
    """A ResNet. If it has ImageNet's stem, it was designed for ImageNet, else for CIFAR-10."""

    block: type[BasicBlock] | type[Bottleneck]
    depths: tuple[int, ...]  # blocks in each stage
    widths: tuple[int, ...]  # channels of each stage before the block's expansion
    stem: str


def _imagenet(block: type[BasicBlock] | type[Bottleneck], *depths: int) -> Architecture:
    return Architecture(block, depths, (64, 128, 256, 512), "imagenet")


def _cifar(depth: int) -> Architecture:
    return Architecture(BasicBlock, (depth,) * 3, (16, 32, 64), "cifar")


# resnet18 to resnet152 are table 1 of He et al., "Deep Residual Learning for Image Recognition" (2015);
# resnet20 to resnet110 are section 4.2's family for 32×32 images, whose shortcuts have no parameters.
ARCHITECTURES = {
    "resnet18": _imagenet(BasicBlock, 2, 2, 2, 2),
    "resnet34": _imagenet(BasicBlock, 3, 4, 6, 3),
    "resnet50": _imagenet(Bottleneck, 3, 4, 6, 3),
    "resnet101": _imagenet(Bottleneck, 3, 4, 23, 3),
    "resnet152": _imagenet(Bottleneck, 3, 8, 36, 3),
    **{f"resnet{6 * depth + 2}": _cifar(depth) for depth in (3, 5, 7, 9, 18)},
}


class ResNet(nn.Module):
    """A module from images, float [N, 3, H, W], to logits [N, num_classes].

    Its fresh weights are He et al.'s initialization, "Delving Deep into Rectifiers" (2015).
    """

    def __init__(
        self, architecture: Architecture, num_classes: int | None = None, stem: str | None = None
    ):
        """
        Args:
            architecture: its blocks, a row of `ARCHITECTURES`. The functions of `ARCHS` have it already.
            num_classes: number of logits; None for the classes of the data set that it was made for.
            stem: "imagenet" for images of about 224×224 pixels: a 7×7 convolution of stride 2 and a pool.
                "cifar" for about 32×32: a 3×3 convolution that keeps the size. None for the architecture's.

        Raises:
            ValueError: another stem.
        """
        super().__init__()
        stem = architecture.stem if stem is None else stem
        if stem not in STEMS:
            raise ValueError(f'stem="{stem}" is none of {", ".join(STEMS)}')
        size, stride = STEMS[stem]
        block, depths, widths = architecture.block, architecture.depths, architecture.widths
        self.conv1 = _conv(3, widths[0], size, stride)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.pool = nn.MaxPool2d(3, 2, padding=1) if stem == "imagenet" else nn.Identity()

        is_for_imagenet = architecture.stem == "imagenet"
        # He et al. use option B, a 1×1 convolution, for ImageNet, and A, without parameters, for CIFAR-10.
        shortcut_of = _projection if is_for_imagenet else PadShortcut
        channels = widths[0]
        self.num_stages = len(depths)
        for stage, (depth, width) in enumerate(zip(depths, widths, strict=True), start=1):
            blocks = []
            for index in range(depth):
                stride = 2 if stage > 1 and index == 0 else 1
                out, shortcut = width * block.expansion, None
                if stride != 1 or channels != out:
                    shortcut = shortcut_of(channels, out, stride)
                blocks.append(block(channels, width, stride, shortcut))
                channels = out
            self.add_module(f"layer{stage}", nn.Sequential(*blocks))
        self.fc = nn.Linear(channels, num_classes or (1000 if is_for_imagenet else 10))

        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """The logits, float [N, num_classes]."""
        x = self.pool(F.relu(self.bn1(self.conv1(x)), inplace=True))
        for stage in range(1, self.num_stages + 1):
            x = self.get_submodule(f"layer{stage}")(x)
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


class PooledBlock(nn.Module):
    """A 3×3 convolution and a max-pool, then a residual 3×3 convolution.

    From images [N, C_in, H, W] to [N, channels, H / 2, W / 2].
    """

    def __init__(self, in_channels: int, channels: int):
        super().__init__()
        self.conv1 = _conv(in_channels, channels, 3)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = _conv(channels, channels, 3)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(F.max_pool2d(self.conv1(x), 2)), inplace=True)
        return F.relu(self.bn2(self.conv2(x)) + x, inplace=True)


class WhitenedResNet(nn.Module):
    """A small ResNet for CIFAR-10, which learns in few epochs.

    From images, float [N, 3, H, W], to logits [N, num_classes].
    It has the shape of Page's ResNet for DAWNBench ("How to Train Your ResNet", 2018) and of Jordan's
    airbench (2024). The first convolution is never trained: `whiten` computes it from the images. So its
    outputs are uncorrelated from the first step on, which the model need not learn.
    """

    def __init__(
        self, widths: tuple[int, ...], num_classes: int | None = None, stem: str | None = None
    ):
        """
        Args:
            widths: channels of each block.
            num_classes: number of logits; None for CIFAR-10's 10.
            stem: None, because the model has its own.

        Raises:
            ValueError: another stem.
        """
        super().__init__()
        if stem not in (None, "whitened"):
            raise ValueError(f'stem="{stem}": this model has its own')
        patch = 3 * 2 * 2  # values in a patch of 2×2 pixels
        self.conv1 = nn.Conv2d(3, 2 * patch, 2, bias=False).requires_grad_(False)
        channels = (2 * patch, *widths)
        self.blocks = nn.Sequential(*map(PooledBlock, channels, widths))
        self.fc = nn.Linear(widths[-1], num_classes or 10)
        for block in self.blocks.modules():
            if isinstance(block, nn.Conv2d):
                nn.init.kaiming_normal_(block.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """The logits, float [N, num_classes]."""
        x = self.blocks(F.relu(self.conv1(x), inplace=True))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits

    @torch.no_grad()
    def whiten(self, images: Tensor) -> None:
        """Set the first convolution to the principal components of the images' patches, float [N, 3, H, W].

        Each component has about the same variance. The second half of the filters is the negative of the
        first, because the ReLU that follows would lose half of each component.
        """
        patches = F.unfold(images.double(), 2).transpose(1, 2).flatten(0, 1)  # [patches, 12]
        variances, components = torch.linalg.eigh(patches.T @ patches / len(patches))
        filters = (components / (variances + _LEAST_VARIANCE).sqrt()).T.view(-1, 3, 2, 2)
        self.conv1.weight.copy_(torch.cat([filters, -filters]))


BLOCKS = (BasicBlock, Bottleneck, PooledBlock)  # the parts that fully_shard gathers one by one

# By the names of --arch: functions that build a ResNet, images [N, 3, H, W] to logits [N, num_classes].
ARCHS: dict[str, Callable[..., Any]] = {
    **{name: partial(ResNet, architecture) for name, architecture in ARCHITECTURES.items()},
    "whitened_resnet8": partial(WhitenedResNet, (32, 96, 128)),
}
