"""Copies of tensors in the memory of the host: made in a step, read by the thread that saves."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mpiddp.checkpoints.state import PACKED_TYPES, Packed, Row

_SMALL = 1 << 14  # elements of a tensor that shares its storage with others in the files
_ROW = 1 << 24  # elements of such a storage
_PART = 1 << 15  # elements that torch examines in one thread, beside those of the training


def to_host(tensors: Sequence[Tensor]) -> tuple[list[Any], list[Tensor], Callable[[], None]]:
    """Copies of the tensors on the CPU, the memory that they share, and a function that waits for it.

    Tied tensors have one copy, an expanded one has a copy of what it repeats, and small ones share a few rows
    of memory, as `Packed`. With a GPU, torch pins the memory of the copies and keeps it for the next ones.
    The copies run on the current stream: later steps change the originals only afterwards, and only the
    reader of the copies waits.
    """
    events: dict[torch.device, torch.Event] = {}
    rows: dict[Any, list[Row]] = defaultdict(lambda: [Row()])
    first: dict[
        int, int
    ] = {}  # the number of the first tensor at an address; no tuples, which gc counts
    copies: list[Any] = []
    blocks: list[Tensor] = []
    with torch.inference_mode(False), torch.no_grad():
        for number, value in enumerate(tensors):
            before = first.setdefault(value.data_ptr(), number)
            if before < number and _is_same(value, tensors[before]):
                copies.append(copies[before])
                continue
            device, dtype, shape = value.device, value.dtype, value.shape
            if device.type != "cpu" and device not in events:
                events[device] = torch.Event(device)
            size = value.numel()
            if size <= _SMALL and dtype in PACKED_TYPES and value.is_contiguous():
                row = rows[device, dtype]
                if row[-1].size > _ROW:
                    row.append(Row())
                copies.append(Packed(row[-1], row[-1].size, shape))
                row[-1].parts.append(value.reshape(-1))
                row[-1].size += size
            else:
                copy = _unexpanded(value.detach()).to("cpu", non_blocking=True, copy=True)
                blocks.append(copy)
                copies.append(copy if copy.shape == shape else copy.expand(shape))
        for each in (each for row in rows.values() for each in row):
            each.block = torch.cat(each.parts).to("cpu", non_blocking=True)
            each.parts.clear()
            blocks.append(each.block)
    for device, event in events.items():
        event.record(torch.accelerator.current_stream(device))

    def wait_for_copies() -> None:
        for event in events.values():
            event.synchronize()

    return copies, blocks, wait_for_copies


def _is_same(a: Tensor, b: Tensor) -> bool:
    return (a.dtype, a.shape, a.stride(), a.is_conj()) == (
        b.dtype,
        b.shape,
        b.stride(),
        b.is_conj(),
    )


def _unexpanded(value: Tensor) -> Tensor:
    """The part of a tensor that its dimensions of stride 0 repeat."""
    for dim, (size, stride) in enumerate(zip(value.shape, value.stride(), strict=True)):
        if stride == 0 and size > 1:
            value = value.narrow(dim, 0, 1)
    return value


def worst(tensors: Sequence[Any]) -> float:
    """NaN if a tensor has one, else an infinity that one has, else 0."""
    worst = 0.0
    for each in tensors:
        value = each.tensor if type(each) is Packed else each
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
