"""Send files from one rank to all ranks, in pieces, so that no rank holds a whole file in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mpiddp.checkpoints.saved import TensorGroup

CHUNK_BYTES = 16 << 20


def chunks(
    source: int, folder: Path, files: list[tuple[str, int]], group: TensorGroup
) -> Iterator[tuple[str, memoryview]]:
    """The pieces of each file, on every rank. Each step of this iterator is a broadcast.

    Args:
        source: the rank that has the files, in its `folder`.
        files: their names and sizes in bytes, the same on every rank.
    """
    for name, size in files:
        with contextlib.ExitStack() as stack:
            is_source = dist.get_rank() == source
            file = stack.enter_context((folder / name).open("rb")) if is_source and size else None
            for start in range(0, size, CHUNK_BYTES):
                chunk = empty_chunk(size - start)
                if file is not None:
                    file.readinto(bytes_of(chunk))
                on_device = chunk.to(group.device)
                dist.broadcast(on_device, source, group=group.group)
                yield name, bytes_of(on_device.cpu())


def empty_chunk(num_bytes: int) -> Tensor:
    """Memory for the next chunk of a file of which `num_bytes` are left: uint8 [at most CHUNK_BYTES]."""
    return torch.empty(min(num_bytes, CHUNK_BYTES), dtype=torch.uint8)


def bytes_of(chunk: Tensor) -> memoryview:
    """The memory of a chunk on the CPU."""
    return memoryview(chunk.numpy())  # type: ignore[arg-type]
