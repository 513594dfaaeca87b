"""Muon: an optimizer whose updates of the convolutions are orthogonal matrices.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024. A gradient of a convolution
is much larger in a few directions than in all others. An orthogonal update moves the weights equally far in
all directions, so a ResNet learns in fewer epochs: docs/evidence/accuracy.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Jordan's training of CIFAR-10 has these values for convolutions (airbench94_muon, 2024). Their learning
# rate is relative to that of the other parameters.
_MOMENTUM, _RELATIVE_LR = 0.6, 0.5
# Newton and Schulz's iteration, with Jordan's coefficients of x, x³ and x⁵.
_ROUNDS, _FIRST, _THIRD, _FIFTH = 3, 3.4445, -4.7750, 2.0315


class Muon(torch.optim.Optimizer):
    """Orthogonal updates for convolutions, and SGD with Nesterov momentum for all other parameters.

    In place of weight decay, the filters of a convolution keep a norm of 1 in the mean. The BatchNorm that
    follows makes their size meaningless.

    Each rank computes the new weights of some convolutions, and an all-gather gives them to all. So the work
    is shared, and all ranks have the same bits, even if their processors round differently.
    """

    def __init__(
        self,
        convolutions: list[nn.Parameter],  # [C_out, C_in, height, width], each before a BatchNorm
        others: Iterable[dict[str, Any]],  # groups of the other parameters, with "weight_decay"
        *,
        lr: float,
        momentum: float,  # of the other parameters
    ) -> None:
        groups = [{"params": convolutions, "weight_decay": 0.0}, *others]
        super().__init__(groups, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update all parameters. A collective: every rank must call it."""
        group, *others = self.param_groups
        if group["params"]:
            self._step_orthogonal(group["params"], lr=_RELATIVE_LR * group["lr"])
        for group in others:
            for parameter in group["params"]:
                gradient = parameter.grad + group["weight_decay"] * parameter
                direction = self._nesterov(parameter, gradient, group["momentum"])
                parameter.add_(direction, alpha=-group["lr"])

    def _step_orthogonal(self, convolutions: list[nn.Parameter], *, lr: float) -> None:
        has_ranks = dist.is_initialized()
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if has_ranks else (0, 1)
        # The largest parameters come first, and each goes to the rank with the least work so far, because all
        # ranks wait for the slowest one.
        shares: list[list[nn.Parameter]] = [[] for _ in range(world_size)]
        work = [0] * world_size
        for parameter in sorted(convolutions, key=Tensor.numel, reverse=True):
            least = work.index(min(work))
            shares[least].append(parameter)
            work[least] += parameter.numel()
        # All ranks have the momentum of all weights, because a resume may have other shares.
        nesterov = {
            weights: self._nesterov(weights, weights.grad, _MOMENTUM) for weights in convolutions
        }
        # Weights of one shape form one product: a GPU takes as long to start a small one as to compute it.
        by_shape = attrgetter("shape")
        for _, group in groupby(sorted(shares[rank], key=by_shape), key=by_shape):
            same = list(group)
            directions = orthogonal(torch.stack([nesterov[parameter] for parameter in same]))
            for parameter, direction in zip(same, directions, strict=True):
                scaled = parameter * (len(parameter) ** 0.5 / parameter.norm())
                parameter.copy_(scaled - lr * direction)
        if world_size > 1:
            _gather(shares, rank)

    def _nesterov(self, weights: Tensor, gradient: Tensor | None, momentum: float) -> Tensor:
        """Add the gradient to the momentum of the weights, and return the direction of their update."""
        assert gradient is not None
        state = self.state[weights]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weights)
        buffer: Tensor = state["momentum_buffer"]
        buffer.mul_(momentum).add_(gradient)
        return gradient + momentum * buffer


def _gather(shares: list[list[nn.Parameter]], rank: int) -> None:
    """Give every rank the new weights of all shares, in one collective: many small ones cost more."""
    sizes = [[parameter.numel() for parameter in share] for share in shares]
    new = shares[0][0].new_zeros(len(shares), max(map(sum, sizes)))  # a row for each rank
    parts = [row[: sum(size)].split(size) for row, size in zip(new, sizes, strict=True)]
    # Views in one dimension follow the order of memory, so their copies are quick in any layout.
    flat = [[weights.as_strided((weights.numel(),), (1,)) for weights in share] for share in shares]
    for parameter, part in zip(flat[rank], parts[rank], strict=True):
        part.copy_(parameter)
    dist.all_gather(list(new.unbind()), new[rank].clone())
    for share, row in zip(flat, parts, strict=True):
        for parameter, part in zip(share, row, strict=True):
            parameter.copy_(part)


def orthogonal(weights: Tensor) -> Tensor:
    """Nearly the closest matrices with orthogonal rows, or columns, whichever are fewer.

    Newton and Schulz's iteration brings the singular values of [C_out, C_in · height · width] to between 0.7
    and 1.2. It computes in the device's fast type, because bfloat16 is exact enough for the update. Each
    round multiplies the matrix by a polynomial of its product with its transpose. That product is smaller,
    so the rounds work on it, and the matrix is multiplied once. The weights and the result are
    [matrices, C_out, C_in, height, width], of one type.
    """
    matrix = weights.flatten(2).to(fast_dtype(weights.device))
    is_tall = matrix.shape[1] > matrix.shape[2]
    matrix = matrix.mT if is_tall else matrix
    matrix = matrix / (matrix.norm(dim=(1, 2), keepdim=True) + 1e-7)
    product = matrix @ matrix.mT
    polynomial = factor = _polynomial(product)
    for _ in range(_ROUNDS - 1):
        product = polynomial @ product @ polynomial
        polynomial = _polynomial(product)
        factor = polynomial @ factor
    matrix = factor @ matrix
    matrix = matrix.mT if is_tall else matrix
    result: Tensor = matrix.reshape(weights.shape).to(weights.dtype)
    return result


def _polynomial(product: Tensor) -> Tensor:
    """The factor of a round, from the products [matrices, n, n] of the matrix with its transpose."""
    unit = torch.eye(product.shape[-1], dtype=product.dtype, device=product.device)
    return _FIRST * unit + _THIRD * product + _FIFTH * product @ product


@cache
def fast_dtype(device: torch.device) -> torch.dtype:
    """The type in which the device computes fast: bfloat16 if it has instructions for it, else float32.

    A processor without these instructions emulates bfloat16, which takes up to 16 times as long as float32.
    Whoever limits torch and oneDNN to AVX2 (ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2) gets the type
    of a processor that has no more than AVX2.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):  # torch answers for the current device
            has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:  # "Features" on Arm
            line = next((line for line in lines if line.startswith(("flags", "Features"))), "")
        is_limited = torch.backends.cpu.get_cpu_capability() in ("AVX2", "NO AVX", "DEFAULT")
        instructions = {"bf16"} if is_limited else {"avx512_bf16", "bf16"}  # of Arm, and of x86
        has_bf16 = not instructions.isdisjoint(line.split())
        # Unless it is limited, oneDNN says yes to every processor with AVX-512, and emulates bfloat16 there.
        has_onednn = torch.backends.mkldnn.is_available()
        has_bf16 = has_bf16 and has_onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if has_bf16 else torch.float32
