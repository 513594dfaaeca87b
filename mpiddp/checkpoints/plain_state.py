"""The state that a script may save: whatever torch.load reads again with weights_only, as it was.

Every value has exactly one of the types below. A subclass, such as numpy.float64 for a float, would be saved
as code, and refused when it is read.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

import torch
from torch import Tensor

_SCALARS = (int, float, bool, str, type(None))
_DICTS = (dict, OrderedDict, Counter)  # a state_dict is an OrderedDict; MultiStepLR has a Counter
_LISTS = (list, tuple)
_MAX_BITS = 2000  # of a whole number; torch.load reads no longer one
_MAX_DEPTH = 100
_EXPECTED = "Expected tensors, numbers, strings, None, lists and dicts of these"


def check_state(name: str, value: object, depth: int = 0) -> None:
    """Raise TypeError if the value cannot be saved. The error names the path to it.

    Args:
        name: the path to the value: "state['optimizer']".
    """
    kind = type(value)
    if kind in (Tensor, torch.nn.Parameter):
        _check_tensor(name, value)
    elif kind is int:
        if int(value).bit_length() > _MAX_BITS:  # type: ignore[call-overload]
            raise TypeError(f"{name}: the number is too long to be saved.")
    elif kind in _SCALARS:
        return
    elif depth == _MAX_DEPTH:
        raise TypeError(f"{name[:80]}…: nested too deeply to be saved.")
    elif isinstance(value, _DICTS) and kind in _DICTS:
        for key, each in value.items():
            check_state(f"{name}[{str(key)[:40]!r}]", each, depth + 1)
            if type(key) not in _SCALARS:
                raise TypeError(
                    f"{name}: a key of type {_type_name(key)}. Use strings or numbers as keys."
                )
    elif isinstance(value, _LISTS) and kind in _LISTS:
        for index, each in enumerate(value):
            check_state(f"{name}[{index}]", each, depth + 1)
    else:
        raise TypeError(f"{name}: cannot save {_type_name(value)}. {_EXPECTED}{_hint(value)}.")


def _check_tensor(name: str, tensor: Any) -> None:
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name}: cannot save a tensor in the layout {tensor.layout}.")
    if tensor.is_meta:
        raise TypeError(f"{name}: cannot save a tensor on the meta device: it has no values.")
    if tensor.is_quantized:
        raise TypeError(f"{name}: cannot save a quantized tensor.")


def _hint(value: object) -> str:
    """How to convert the value, as the end of a sentence."""
    if isinstance(value, Tensor):
        if hasattr(value, "full_tensor"):  # a DTensor of FSDP has a part of the values
            return ": gather it with full_tensor()"
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
