"""Copies of tensors in the memory of the host: made in a step, read by the thread that saves."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors as flattened  # as DDP has its buckets

_SMALL = 1 << 14  # elements of a tensor that is copied in one block with others
_NAMES = "float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool"
_JOINED = {getattr(torch, name) for name in _NAMES.split()}  # types of which torch joins tensors
_PART = 1 << 15  # elements that torch examines in one thread, beside those of the training


@dataclass
class Copies:
    """Copies of tensors on the CPU, in blocks of memory.

    A copy is a range of a block's elements. Lists of numbers, because gc would count a tuple for each tensor.
    """

    blocks: list[Tensor] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)  # of the blocks
    block_of: list[int] = field(default_factory=list)  # for each tensor
    start_of: list[int] = field(default_factory=list)  # its first element there
    wait: Callable[[], None] = lambda: None  # until the copies are done

    def add(self, block: Tensor, group: str) -> int:
        """Returns its number."""
        self.blocks.append(block)
        self.groups.append(group)
        return len(self.blocks) - 1


def to_host(tensors: Sequence[Tensor], groups: Sequence[str]) -> Copies:
    """Copies of the tensors on the CPU, each in a block of its own, or small ones together with their group.

    Tied tensors have one copy, an expanded one has a copy of what it repeats. With a GPU, torch pins the
    memory of the copies and keeps it for the next ones. The copies run on the current stream: later steps
    change the originals only afterwards, and only the reader of the copies waits.
    """
    events: dict[torch.device, torch.Event] = {}
    joined: dict[Any, list[int]] = defaultdict(list)  # the numbers of small ones
    tied: dict[int, int] = {}
    first: dict[int, int] = {}  # the number of the first tensor at an address
    copies = Copies(block_of=[0] * len(tensors), start_of=[0] * len(tensors))
    with torch.inference_mode(False), torch.no_grad():
        for number, value in enumerate(tensors):
            before = first.setdefault(value.data_ptr(), number)
            is_known = before < number and groups[before] == groups[number]
            if is_known and _is_same(value, tensors[before]):
                tied[number] = before
                continue
            device, size = value.device, value.numel()
            if device.type != "cpu" and device not in events:
                events[device] = torch.Event(device)
            if 0 < size <= _SMALL and value.dtype in _JOINED and value.is_contiguous():
                joined[device, value.dtype, groups[number]].append(number)
            else:
                copy = _unexpanded(value.detach()).to("cpu", non_blocking=True, copy=True)
                copies.block_of[number] = copies.add(copy, groups[number])
        for (*_, group), numbers in joined.items():
            block = flattened([tensors[number] for number in numbers])
            # One tensor alone is not copied by torch.
            copy = block.to("cpu", non_blocking=True, copy=len(numbers) == 1)
            start, place = 0, copies.add(copy, group)
            for number in numbers:
                copies.block_of[number], copies.start_of[number] = place, start
                start += tensors[number].numel()
    for number, before in tied.items():
        copies.block_of[number] = copies.block_of[before]
        copies.start_of[number] = copies.start_of[before]
    for device, event in events.items():
        event.record(torch.accelerator.current_stream(device))

    def wait_for_copies() -> None:
        for event in events.values():
            event.synchronize()

    copies.wait = wait_for_copies
    return copies


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


def worst(value: Tensor) -> float:
    """NaN if a tensor has one, else an infinity that it has, else 0."""
    worst = 0.0
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    if not value.is_floating_point() or value.element_size() == 1:
        return worst  # fp8 and fp4 have scales beside them
    for part in _in_a_row(value).split(_PART):
        for found in torch.aminmax(part) if part.numel() else ():
            number = found.item()
            if math.isnan(number):
                return number
            worst = worst if math.isfinite(number) else number
    return worst


def _in_a_row(value: Tensor) -> Tensor:
    """The elements of a copy, in the order of its memory. Copies only what has gaps."""
    if value.untyped_storage().nbytes() == value.numel() * value.element_size():
        return value.as_strided((value.numel(),), (1,), 0)
    return value.reshape(-1)
