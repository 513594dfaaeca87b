"""The architectures of `mpiddp train --arch` as data. This module does not import torch.

resnet18 to resnet152 are table 1 of He et al., "Deep Residual Learning for Image Recognition" (2015);
resnet20 to resnet110 are section 4.2's family for 32×32 images, whose shortcuts have no parameters.
wide_resnet14_2 is of this family too, with fewer blocks, twice the channels (Zagoruyko and Komodakis, "Wide
Residual Networks", 2016), and half the height and width from the first convolution on. A CPU computes many
channels of small images faster than few of large ones: docs/evidence/accuracy.md has the figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Block = Literal["basic", "bottleneck"]
SMALL_IMAGE = 64  # pixels: the ImageNet stem would shrink smaller images too much


@dataclass(frozen=True)
class Architecture:
    """A ResNet. `stem` and `num_classes` default to those of the data set it was designed for."""

    block: Block
    depths: tuple[int, ...]  # blocks in each stage
    widths: tuple[int, ...]  # channels of each stage before the block's expansion
    stem: str
    num_classes: int
    pad_shortcuts: bool  # option A of He et al., without parameters; else B, a 1×1 convolution
    optimizer: str = "sgd"  # the default of --optimizer


def _imagenet(block: Block, *depths: int) -> Architecture:
    return Architecture(block, depths, (64, 128, 256, 512), "imagenet", 1000, pad_shortcuts=False)


def _cifar(depth: int) -> Architecture:
    return Architecture("basic", (depth,) * 3, (16, 32, 64), "cifar", 10, pad_shortcuts=True)


ARCHITECTURES = {
    "resnet18": _imagenet("basic", 2, 2, 2, 2),
    "resnet34": _imagenet("basic", 3, 4, 6, 3),
    "resnet50": _imagenet("bottleneck", 3, 4, 6, 3),
    "resnet101": _imagenet("bottleneck", 3, 4, 23, 3),
    "resnet152": _imagenet("bottleneck", 3, 8, 36, 3),
    "resnet20": _cifar(3),
    "resnet32": _cifar(5),
    "resnet44": _cifar(7),
    "resnet56": _cifar(9),
    "resnet110": _cifar(18),
    "wide_resnet14_2": Architecture(
        "basic", (2, 2, 2), (32, 64, 128), "half", 10, pad_shortcuts=True, optimizer="muon"
    ),
}


def stem_of(arch: str, stem: str, pixels: int) -> str:
    """The stem of --stem, which "auto" leaves to the architecture and the height of the images."""
    if stem != "auto":
        return stem
    if pixels >= SMALL_IMAGE:
        return "imagenet"
    own = ARCHITECTURES[arch].stem
    return own if own != "imagenet" else "cifar"
