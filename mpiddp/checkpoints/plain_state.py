"""The state that a script may save: whatever torch.load reads again with weights_only, and DTensors.

Every value has exactly one of the types below. A subclass, such as numpy.float64 for a float, would be saved
as code, and refused when it is read.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

import torch
from torch import Tensor

from mpiddp.checkpoints.shards.state import is_sharded

_SCALARS = (int, float, bool, str, type(None))
_DICTS = (dict, OrderedDict, Counter)  # a state_dict is an OrderedDict; MultiStepLR has a Counter
_LISTS = (list, tuple)
_MAX_BITS = 2000  # of a whole number; torch.load reads no longer one
_MAX_DEPTH = 100
_LONGEST_PATH = 200  # characters
_EXPECTED = "Expected tensors, numbers, strings, None, lists and dicts of these"


class _CannotBeSaved(Exception):
    """A value that cannot be saved. Each container that has it adds its key to the path, innermost first."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.path: list[str] = []


def check_state(name: str, value: object) -> None:
    """Raise TypeError if the value cannot be saved. The error names the path to it.

    Args:
        name: of the value: "state". The path begins with it: "state['optimizer']['lr']".
    """
    try:
        _check(value, 0)
    except _CannotBeSaved as error:
        path = "".join(reversed(error.path))
        shown = path if len(path) <= _LONGEST_PATH else f"{path[:_LONGEST_PATH]}…"
        raise TypeError(f"{name}{shown}: {error}.") from None


def _check(value: Any, depth: int) -> None:
    kind = type(value)
    if is_sharded(value):
        _check_sharded(value)
    elif kind is Tensor or kind is torch.nn.Parameter:
        _check_tensor(value)
    elif kind in _SCALARS:
        if _is_too_long(value):
            raise _CannotBeSaved("the number is too long to be saved")
    elif depth == _MAX_DEPTH:
        raise _CannotBeSaved("nested too deeply to be saved")
    elif kind in _DICTS:
        for key, each in value.items():
            if _is_too_long(key):  # repr() may refuse it too
                raise _CannotBeSaved("a key is a number that is too long to be saved")
            _check_item(key, each, depth)
            if type(key) not in _SCALARS:
                raise _CannotBeSaved(
                    f"a key of type {_type_name(key)}. Use strings or numbers as keys"
                )
    elif kind in _LISTS:
        for index, each in enumerate(value):
            _check_item(index, each, depth)
    else:
        raise _CannotBeSaved(f"cannot save {_type_name(value)}. {_EXPECTED}{_hint(value)}")


def _is_too_long(value: object) -> bool:
    return type(value) is int and value.bit_length() > _MAX_BITS


def _check_item(key: object, value: object, depth: int) -> None:
    try:
        _check(value, depth + 1)
    except _CannotBeSaved as error:
        error.path.append(f"[{key!r}]")
        raise


def _check_tensor(tensor: Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise _CannotBeSaved(f"cannot save a tensor in the layout {tensor.layout}")
    if tensor.is_meta:
        raise _CannotBeSaved("cannot save a tensor on the meta device: it has no values")
    if tensor.is_quantized:
        raise _CannotBeSaved("cannot save a quantized tensor")


def _check_sharded(tensor: Any) -> None:
    if any(placement.is_partial() for placement in tensor.placements):
        raise _CannotBeSaved("cannot save a DTensor whose ranks hold summands: redistribute it")
    _check_tensor(tensor.to_local())


def _hint(value: object) -> str:
    """How to convert the value, as the end of a sentence."""
    if isinstance(value, Tensor):
        return ": convert it to a plain tensor"
    if hasattr(value, "dtype") and hasattr(value, "item"):  # of numpy
        is_array = getattr(value, "ndim", 0) > 0
        return f": convert it with {'torch.from_numpy()' if is_array else '.item()'}"
    if hasattr(value, "state_dict"):
        return ": save its state_dict()"
    if isinstance(value, dict):
        return ": convert it with dict()"
    if isinstance(value, (list, tuple, set, frozenset)):
        return ": convert it with list()"
    return ""


def _type_name(value: object) -> str:
    kind = type(value)
    prefix = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{prefix}{kind.__qualname__}"
