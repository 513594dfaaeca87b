"""`mpiddp train` under the eyes of hooks of torch: what each rank trains on, and what it sends.

    mpiddp launch -n 2 tests/programs/watched_training.py FOLDER OPTIONS…

Each rank writes the numbers of its images (see tiny_data.numbered_images) into FOLDER/images_RANK.jsonl, a
line for each step. Rank 0 writes the gradients and the reductions of the first step into FOLDER/first.pt.
Each rank writes FOLDER/bytes_RANK: what its parameters, gradients and momentum have allocated after the first
step, and what one copy of the model needs.

    KILL_AFTER_STEPS=5     rank 0 kills itself after this many steps of the first attempt
    PLAIN=1                BatchNorm scales and shifts only, so that images do not depend on each other
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from mpiddp import cli

folder = Path(sys.argv[1])
images = []
num_steps = 0
profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


def before_forward(module, inputs):
    # A pass over zeros, before the first step, lets DDP divide the gradients into buckets.
    if "ResNet" in type(module).__name__ and module.training and inputs[0].any():
        # ImageNet's mean and deviation, which the loader of image folders normalizes with.
        reds = (inputs[0][:, 0, 8, 8].float() * 0.229 + 0.485) * 255
        images.extend(round((red - 20) / 2) for red in reds.tolist())


def before_step(optimizer, args, kwargs):
    if num_steps == 0:
        profiler.stop()
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        grads = [each.grad for each in parameters]
        grads = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in grads]
        reductions = [each for each in profiler.events() if each.name == "gloo:all_reduce"]
        if dist.get_rank() == 0:
            torch.save({"gradients": grads, "reductions": len(reductions)}, folder / "first.pt")


def count_bytes(optimizer, file):
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


def after_step(optimizer, args, kwargs):
    global num_steps
    num_steps += 1
    rank = dist.get_rank()
    if num_steps == 1:
        count_bytes(optimizer, folder / f"bytes_{rank}")
    with (folder / f"images_{rank}.jsonl").open("a") as file:
        file.write(json.dumps(images) + "\n")
    images.clear()
    is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if rank == 0 and is_first and str(num_steps) == os.environ.get("KILL_AFTER_STEPS"):
        os.kill(os.getpid(), signal.SIGKILL)


def scale_and_shift(self, inputs):
    statistics = (self.running_mean, self.running_var)
    return torch.nn.functional.batch_norm(inputs, *statistics, self.weight, self.bias)


if "PLAIN" in os.environ:
    torch.nn.BatchNorm2d.forward = scale_and_shift
register_module_forward_pre_hook(before_forward)
register_optimizer_step_pre_hook(before_step)
register_optimizer_step_post_hook(after_step)
profiler.start()
sys.exit(cli.main(["train", *sys.argv[2:]]))
