"""The states of the random number generators of a process: Python's, numpy's, torch's on CPU and GPUs."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

_NUMPY_KIND = "MT19937"  # of numpy's global generator, unless a script replaces it


def rng_states(local_rank: int) -> dict[str, Any]:
    """The states as tensors, numbers and tuples. Each GPU has one if this process uses GPUs."""
    states: dict[str, Any] = {
        "local_rank": local_rank,
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
    }
    gpu = torch.accelerator.current_accelerator()
    if gpu and (gpus := torch.get_device_module(gpu)).is_initialized():
        states[gpu.type] = gpus.get_rng_state_all()
    if numpy := sys.modules.get("numpy"):
        kind, keys, *rest = numpy.random.get_state(legacy=True)
        if kind == _NUMPY_KIND:
            states["numpy"] = (torch.from_numpy(keys.astype("int64")), *rest)
    return states


def restore_rng_states(states: dict[str, Any], local_rank: int) -> None:
    """Restore the states of `rng_states`, as many of them as there are.

    The GPU of the local rank gets the state of the one that the rank had before, perhaps with another
    number.
    """
    if "python" in states:
        random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    gpu = torch.accelerator.current_accelerator()
    saved_gpus = states.get(gpu.type, []) if gpu else []
    for index in range(torch.accelerator.device_count() if saved_gpus else 0):
        saved = index - local_rank + states["local_rank"]
        if 0 <= saved < len(saved_gpus):
            torch.get_device_module(gpu).set_rng_state(saved_gpus[saved], index)
    if gpu and "own_gpu" in states:
        torch.get_device_module(gpu).set_rng_state(states["own_gpu"])
    numpy = sys.modules.get("numpy")
    if numpy and "numpy" in states:
        keys, *rest = states["numpy"]
        numpy.random.set_state((_NUMPY_KIND, keys.numpy().astype("uint32"), *rest))
