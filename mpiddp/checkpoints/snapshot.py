"""A training's tensors copied into host memory that is there already: all that a save takes from a step.

On a GPU the memory is pinned and the copies run on the current stream: the steps that follow change
the originals only when they are done, and nobody waits but the one who reads the copies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_Form = tuple[torch.dtype, torch.Size, tuple[int, ...]]


class PinnedStaging:
    """Copies of tensors on the CPU; the memory of one `copy` is used again by the next."""

    def __init__(self, expected: Iterable[Tensor], device: torch.device) -> None:
        """`expected`: tensors in the forms that will be copied, so that no step waits for memory."""
        self._device = device
        self._free: dict[_Form, list[Tensor]] = defaultdict(list)
        self._used: list[tuple[_Form, Tensor]] = []
        self._is_copied = torch.cuda.Event() if device.type == "cuda" else None
        for tensor in expected:
            # Written to, or the system would find the pages only when the first copy needs them.
            self._free[_form(tensor)].append(self._new_like(tensor).zero_())

    def copy(self, nested: Any) -> Any:
        """The same dicts, lists and numbers, with copies of the tensors. Ends the previous copy's life.

        To be read after `wait`.
        """
        for form, host in self._used:
            self._free[form].append(host)
        self._used = []
        copied = self._copy(nested)
        if self._is_copied is not None:
            self._is_copied.record()
        return copied

    def wait(self) -> None:
        """Until the copies hold what they should: at once on a CPU. For the thread that reads them."""
        if self._is_copied is not None:
            self._is_copied.synchronize()

    def _copy(self, nested: Any) -> Any:
        if isinstance(nested, Tensor):
            free = self._free[_form(nested)]
            host = free.pop() if free else self._new_like(nested)
            self._used.append((_form(nested), host))
            return host.copy_(nested.detach(), non_blocking=True)
        if isinstance(nested, dict):
            return {key: self._copy(value) for key, value in nested.items()}
        if isinstance(nested, (list, tuple)):
            return type(nested)(self._copy(value) for value in nested)
        return nested

    def _new_like(self, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device="cpu", pin_memory=self._is_copied is not None)


def _form(tensor: Tensor) -> _Form:
    return tensor.dtype, tensor.shape, tensor.stride()
