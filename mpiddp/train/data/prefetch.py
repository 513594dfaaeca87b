"""On a GPU, the next batch comes in beside the step that computes: by a stream of its own."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from mpiddp.train.data.source import Batch


def prefetched(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """The same batches. What makes them on the device runs on a side stream.

    The host is ahead of the device, so it asks for a batch while an earlier step still computes; a copy
    or a crop on the stream of the steps would wait for that.
    """
    return batches if device.type == "cpu" else _on_side_stream(batches, device)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all epochs: the allocator keeps each stream's memory apart."""
    return torch.cuda.Stream(device)


def _on_side_stream(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    side = _side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))  # the data set was put there on that one
    while True:
        with torch.cuda.stream(side):
            batch = next(batches, None)
        if batch is None:
            return
        current = torch.cuda.current_stream(device)
        current.wait_stream(side)
        for tensor in batch:
            tensor.record_stream(current)  # or its memory could serve the batch after it too early
        yield batch
