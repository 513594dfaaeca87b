"""On a GPU, prepare the next batch on a side stream while a step computes."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from mpiddp.train.data.dataset import Batch


def prefetched(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """The same batches, whose copies and crops on the device run on a side stream.

    The host runs ahead of the device and requests a batch while an earlier step still computes. On the
    stream of the steps, a copy or a crop would wait for that step. Other accelerators than CUDA's and
    ROCm's do without.
    """
    return _on_side_stream(batches, device) if device.type == "cuda" else batches


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all epochs, because the allocator keeps separate memory for each stream."""
    return torch.cuda.Stream(device)


def _on_side_stream(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    side = _side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))  # which copied the data set to the device
    while True:
        with torch.cuda.stream(side):
            batch = next(batches, None)
        if batch is None:
            return
        current = torch.cuda.current_stream(device)
        current.wait_stream(side)
        for tensor in batch:
            tensor.record_stream(
                current
            )  # otherwise the next batch could reuse its memory too early
        yield batch
