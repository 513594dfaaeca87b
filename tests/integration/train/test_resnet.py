"""The ResNets: torchvision's names, shapes and sizes, both stems, the CIFAR models."""

import hashlib
from typing import Any

import pytest
import torch
from torch import nn

from mpiddp.train.resnet import ARCHS, ResNet

# Number of parameters with 1000 classes, and the SHA-256 of `listing` of the state_dict. The digests are
# those of torchvision 0.28.0. With the same state_dict, its outputs and gradients and those of this
# package were equal bit for bit.
TORCHVISION = {
    "resnet18": (11_689_512, "02568eab318c210f0d857b7e345cc37b86e30b66a49663acb8af1653c0d25830"),
    "resnet34": (21_797_672, "bf4f10c2aed3801430de878dec76694c8fbd51965391a9aec02e066f3647d487"),
    "resnet50": (25_557_032, "45c8e0b2d327f1cd29b3d1181bb5f512060349c9662ceb382b545cf1d108ac62"),
    "resnet101": (44_549_160, "b10771e22bd494ebcfaed03f8575a8a04191209f3e4e61de75b06576547cdbfa"),
    "resnet152": (60_192_808, "07011cff596aabda1096e8c7bcdb0ef24119648f1a896ce7845b8b5aad2664fd"),
}

# He et al. 2015, table 6: 0.27, 0.46, 0.66, 0.85 and 1.7 million
CIFAR = {
    "resnet20": 269_722,
    "resnet32": 464_154,
    "resnet44": 658_586,
    "resnet56": 853_018,
    "resnet110": 1_727_962,
}


def listing(state_dict: dict[str, torch.Tensor]) -> str:
    return "".join(f"{name} {list(value.shape)}\n" for name, value in state_dict.items())


def build(arch: str, **options: Any) -> ResNet:
    with torch.device("meta"):  # shapes without values
        model: ResNet = ARCHS[arch](**options)
    return model


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("arch", TORCHVISION)
def test_parameters_and_keys_are_torchvisions(arch):
    model = build(arch)
    digest = hashlib.sha256(listing(model.state_dict()).encode()).hexdigest()
    assert (size(model), digest) == TORCHVISION[arch]


@pytest.mark.parametrize("arch", CIFAR)
def test_cifar_models_have_the_sizes_of_the_paper(arch):
    model = build(arch)
    assert size(model) == CIFAR[arch]
    weighted = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    assert f"resnet{len(weighted)}" == arch  # its shortcuts have no weights


@pytest.mark.parametrize(
    ("stem", "image_size", "last_map"),
    [
        ("imagenet", 224, 7),
        ("cifar", 32, 4),
        ("imagenet", 64, 2),
        ("imagenet", 32, 1),
        ("cifar", 24, 3),
    ],
)
def test_stems(stem, image_size, last_map):
    model = build("resnet18", stem=stem, num_classes=7)
    shapes = []
    last = model.get_submodule("layer4")
    last.register_forward_hook(lambda _module, _inputs, out: shapes.append(out.shape))
    logits = model(torch.empty(2, 3, image_size, image_size, device="meta"))
    assert shapes == [(2, 512, last_map, last_map)]
    assert logits.shape == (2, 7)
