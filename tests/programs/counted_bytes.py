"""A training that counts what its parameters, gradients and momentum have allocated after the first step.

    mpiddp launch -n 2 tests/programs/counted_bytes.py FOLDER OPTIONS…

Each rank writes FOLDER/bytes_RANK: its bytes, and those of one copy of the model.
"""

import sys
from pathlib import Path

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from mpiddp import cli


def after_step(optimizer, args, kwargs):
    file = Path(sys.argv[1], f"bytes_{dist.get_rank()}")
    if file.exists():
        return
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    gradients = [each.grad for each in parameters]
    momentum = [optimizer.state[each]["momentum_buffer"] for each in parameters]
    tensors = [*parameters, *gradients, *momentum]
    allocated = {}  # tensors may share memory: DDP's gradients are parts of its buckets
    for tensor in tensors:
        own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = own.untyped_storage()
        allocated[storage.data_ptr()] = storage.nbytes()
    one_copy = sum(each.numel() * each.element_size() for each in tensors)
    file.write_text(f"{sum(allocated.values())} {one_copy}")


register_optimizer_step_post_hook(after_step)
sys.exit(cli.main(["train", *sys.argv[2:]]))
