"""The memory of a training's state: parameters, gradients and optimizer state, on a rank and as one copy.

It counts the memory that the tensors have allocated. What a step gathers or computes is not part of it, and
the memory of the process would show little of it: most of that are libraries and freed pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class TensorBytes:
    """Bytes of parameters, gradients and optimizer state."""

    of_rank: int  # what this rank has allocated
    of_copy: int  # of the whole model, as each rank has it under DDP

    def __str__(self) -> str:
        return f"{self.of_rank / 1e6:.1f} MB a rank, {self.of_copy / 1e6:.1f} MB in one copy"


def tensor_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> TensorBytes:
    """Count them between a step and the clearing of its gradients."""
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    states = [
        each
        for state in optimizer.state.values()
        for each in state.values()
        if isinstance(each, Tensor)
    ]
    tensors: list[Tensor] = [*parameters, *gradients, *states]
    allocated = {}  # tensors may share memory: DDP's gradients are parts of its buckets
    for tensor in tensors:
        own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = own.untyped_storage()
        allocated[storage.data_ptr()] = storage.nbytes()
    return TensorBytes(
        of_rank=sum(allocated.values()),
        of_copy=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
    )
