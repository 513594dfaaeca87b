"""A training that counts what its parameters, gradients and momentum have allocated after the first step.

python -m tests.jobs.counted_bytes FOLDER OPTIONS…: each rank writes FOLDER/bytes_RANK, its bytes and those of
one copy of the model.
"""

import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from mpiddp import cli


def main(folder: str, *options: str) -> int:
    def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        file = Path(folder, f"bytes_{dist.get_rank()}")
        if not file.exists():
            file.write_text("{} {}".format(*_bytes_of(optimizer)))

    register_optimizer_step_post_hook(after_step)
    return cli.main(["train", *options])


def _bytes_of(optimizer: Optimizer) -> tuple[int, int]:
    """The bytes that this rank has allocated, and those of one copy of the model."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    gradients = [each.grad for each in parameters]
    momentum = [optimizer.state[each]["momentum_buffer"] for each in parameters]
    tensors: list[Tensor] = [*parameters, *gradients, *momentum]
    allocated = {}  # tensors may share memory: DDP's gradients are parts of its buckets
    for tensor in tensors:
        own: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = own.untyped_storage()
        allocated[storage.data_ptr()] = storage.nbytes()
    return sum(allocated.values()), sum(each.numel() * each.element_size() for each in tensors)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
