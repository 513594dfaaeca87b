"""Copy a training's tensors into host memory that is already allocated, the only part of a save in a step.

With a GPU, the memory is pinned and the copies run on the current stream. So later steps change the
originals only after the copies are done, and only the reader of the copies waits.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# The last field: whether the copy's memory is pinned.
_Layout = tuple[torch.dtype, torch.Size, tuple[int, ...], bool]


class PinnedStaging:
    """Copies of tensors on the CPU. Each `copy` reuses the memory of the one before."""

    def __init__(self, expected: Iterable[Tensor] = ()) -> None:
        """Allocate memory for tensors like those in `expected`, so that no step waits for it."""
        self._free: dict[_Layout, list[Tensor]] = defaultdict(list)
        self._used: list[tuple[_Layout, Tensor]] = []
        self._copied: dict[torch.device, torch.Event] = {}
        for tensor in expected:
            # Write to it now, or the system allocates the pages only during the first copy.
            self._free[_layout(tensor)].append(_new_like(tensor).zero_())

    def copy(self, nested: Any) -> Any:
        """The same dicts, lists and numbers, with copies of the tensors. Invalidates the previous copy.

        Call `wait` before reading the copies.
        """
        for layout, host in self._used:
            self._free[layout].append(host)
        self._used = []
        self._copied = {}
        copied = self._copy(nested)
        for device, event in self._copied.items():
            event.record(torch.accelerator.current_stream(device))
        return copied

    def wait(self) -> None:
        """Wait until the copies are complete; on a CPU they are at once. Their reader calls this."""
        for event in self._copied.values():
            event.synchronize()

    def _copy(self, nested: Any) -> Any:
        if isinstance(nested, Tensor):
            free = self._free[_layout(nested)]
            host = free.pop() if free else _new_like(nested)
            self._used.append((_layout(nested), host))
            is_on_gpu = _is_on_gpu(nested)
            if is_on_gpu and nested.device not in self._copied:
                self._copied[nested.device] = torch.Event(nested.device)
            return host.copy_(nested.detach(), non_blocking=is_on_gpu)
        if isinstance(nested, dict):
            copied = {key: self._copy(value) for key, value in nested.items()}
            if (
                type(nested) is OrderedDict
            ):  # a module's state_dict has its versions in an attribute
                ordered = OrderedDict(copied)
                ordered.__dict__.update(nested.__dict__)
                return ordered
            return copied
        if isinstance(nested, (list, tuple)):
            return type(nested)(self._copy(value) for value in nested)
        return nested


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


def _new_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=_is_on_gpu(tensor))


def _layout(tensor: Tensor) -> _Layout:
    return tensor.dtype, tensor.shape, tensor.stride(), _is_on_gpu(tensor)
