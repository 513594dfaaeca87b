"""Copy a training's tensors into host memory that is already allocated, the only part of a save in a step.

With a GPU, the memory is pinned and the copies run on the current stream. So later steps change the
originals only after the copies are done, and only the reader of the copies waits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_Layout = tuple[torch.dtype, torch.Size, tuple[int, ...]]


class PinnedStaging:
    """Copies of tensors on the CPU. Each `copy` reuses the memory of the one before."""

    def __init__(self, expected: Iterable[Tensor], device: torch.device) -> None:
        """Allocate memory for tensors like those in `expected`, so that no step waits for it."""
        self._device = device
        self._free: dict[_Layout, list[Tensor]] = defaultdict(list)
        self._used: list[tuple[_Layout, Tensor]] = []
        self._is_copied = None if device.type == "cpu" else torch.Event(device)
        for tensor in expected:
            # Write to it now, or the system allocates the pages only during the first copy.
            self._free[_layout(tensor)].append(self._new_like(tensor).zero_())

    def copy(self, nested: Any) -> Any:
        """The same dicts, lists and numbers, with copies of the tensors. Invalidates the previous copy.

        Call `wait` before reading the copies.
        """
        for layout, host in self._used:
            self._free[layout].append(host)
        self._used = []
        copied = self._copy(nested)
        if self._is_copied is not None:
            self._is_copied.record()
        return copied

    def wait(self) -> None:
        """Wait until the copies are complete; on a CPU they are at once. Their reader calls this."""
        if self._is_copied is not None:
            self._is_copied.synchronize()

    def _copy(self, nested: Any) -> Any:
        if isinstance(nested, Tensor):
            free = self._free[_layout(nested)]
            host = free.pop() if free else self._new_like(nested)
            self._used.append((_layout(nested), host))
            return host.copy_(nested.detach(), non_blocking=True)
        if isinstance(nested, dict):
            return {key: self._copy(value) for key, value in nested.items()}
        if isinstance(nested, (list, tuple)):
            return type(nested)(self._copy(value) for value in nested)
        return nested

    def _new_like(self, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device="cpu", pin_memory=self._is_copied is not None)


def _layout(tensor: Tensor) -> _Layout:
    return tensor.dtype, tensor.shape, tensor.stride()
