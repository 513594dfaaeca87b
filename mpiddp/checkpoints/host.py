"""Copies of tensors in the memory of the host: made in a step, read by the thread that saves."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors as parts_of  # as DDP has its buckets

from mpiddp.checkpoints.state import PLAIN_TYPES

_SMALL = 1 << 14  # elements of a tensor that shares its storage with others in the files
_ROW = 1 << 12  # tensors of such a storage
_PART = 1 << 15  # elements that torch examines in one thread, beside those of the training


def to_host(tensors: Sequence[Tensor]) -> tuple[list[Any], list[Tensor], Callable[[], None]]:
    """Copies of the tensors on the CPU, the memory that they share, and a function that waits for it.

    Tied tensors have one copy, an expanded one has a copy of what it repeats, and small ones share a few rows
    of memory, because a storage costs more time than a tensor. With a GPU, torch pins the memory of the
    copies and keeps it for the next ones. The copies run on the current stream: later steps change the
    originals only afterwards, and only the reader of the copies waits.
    """
    events: dict[torch.device, torch.Event] = {}
    rows: dict[Any, list[int]] = defaultdict(list)  # the numbers of small ones
    tied: dict[int, int] = {}
    # The number of the first tensor at an address. No tuples, which gc counts.
    first: dict[int, int] = {}
    copies: list[Any] = [None] * len(tensors)
    blocks: list[Tensor] = []
    with torch.inference_mode(False), torch.no_grad():
        for number, value in enumerate(tensors):
            before = first.setdefault(value.data_ptr(), number)
            if before < number and _is_same(value, tensors[before]):
                tied[number] = before
                continue
            device, size = value.device, value.numel()
            if device.type != "cpu" and device not in events:
                events[device] = torch.Event(device)
            if 0 < size <= _SMALL and value.dtype in PLAIN_TYPES and value.is_contiguous():
                rows[device, value.dtype].append(number)
            else:
                copy = _unexpanded(value.detach()).to("cpu", non_blocking=True, copy=True)
                blocks.append(copy)
                copies[number] = copy if copy.shape == value.shape else copy.expand(value.shape)
        for row in rows.values():
            for start in range(0, len(row), _ROW):
                numbers = row[start : start + _ROW]
                parts = [tensors[number] for number in numbers]
                block = torch.cat([part.reshape(-1) for part in parts]).to("cpu", non_blocking=True)
                blocks.append(block)
                for number, copy in zip(numbers, parts_of(block, parts), strict=True):
                    copies[number] = copy
    for number, before in tied.items():
        copies[number] = copies[before]
    for device, event in events.items():
        event.record(torch.accelerator.current_stream(device))

    def wait_for_copies() -> None:
        for event in events.values():
            event.synchronize()

    return copies, blocks, wait_for_copies


def _is_same(a: Tensor, b: Tensor) -> bool:
    return (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride()) and (
        a.is_conj() == b.is_conj()
    )


def _unexpanded(value: Tensor) -> Tensor:
    """The part of a tensor that its dimensions of stride 0 repeat."""
    for dim, (size, stride) in enumerate(zip(value.shape, value.stride(), strict=True)):
        if stride == 0 and size > 1:
            value = value.narrow(dim, 0, 1)
    return value


def worst(tensors: Sequence[Tensor]) -> float:
    """NaN if a tensor has one, else an infinity that one has, else 0."""
    worst = 0.0
    for value in tensors:
        if value.is_complex():
            value = torch.view_as_real(value.resolve_conj())
        if not value.is_floating_point() or value.element_size() == 1 or value.is_quantized:
            continue  # fp8 and fp4 have scales beside them
        for part in _dense(value).split(_PART):
            for found in torch.aminmax(part) if part.numel() else ():
                number = found.item()
                if math.isnan(number):
                    return number
                worst = worst if math.isfinite(number) else number
    return worst


def _dense(value: Tensor) -> Tensor:
    """Its elements in a row, in the order of its memory. Copies only what has gaps."""
    value = _unexpanded(value)
    if value.untyped_storage().nbytes() == value.numel() * value.element_size():
        return value.as_strided((value.numel(),), (1,), 0)
    return value.reshape(-1)
