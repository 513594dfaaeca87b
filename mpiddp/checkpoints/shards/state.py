"""A nested state with sharded tensors: take them out, and put others in their places."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from mpiddp.checkpoints.shards.index import name_of

Path = tuple[Any, ...]  # the keys that lead to a value


def is_sharded(value: object) -> bool:
    """Whether the value is torch's DTensor. Does not import its modules, which takes a while."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def split(nested: Any) -> tuple[Any, dict[str, Tensor]]:
    """The state with None in place of each sharded tensor, and these tensors by name."""
    sharded: dict[str, Tensor] = {}

    def take(path: Path, value: Any) -> Any:
        if not is_sharded(value):
            return value
        sharded[name_of(path)] = value
        return None

    return mapped(nested, take), sharded


def filled(nested: Any, values: Mapping[str, Any]) -> Any:
    """The state with the values at the paths that their names say."""
    return mapped(nested, lambda path, value: values.get(name_of(path), value) if values else value)


def mapped(nested: Any, change: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """The same dicts, lists and tuples, with `change(path, value)` in place of each other value."""
    if isinstance(nested, dict):
        changed = {key: mapped(value, change, (*path, key)) for key, value in nested.items()}
        if type(nested) is dict:
            return changed
        if type(nested) is OrderedDict:  # a state_dict has its versions in an attribute
            ordered = OrderedDict(changed)
            ordered.__dict__.update(nested.__dict__)
            return ordered
        return type(nested)(changed)
    if isinstance(nested, (list, tuple)):
        return type(nested)(
            mapped(value, change, (*path, index)) for index, value in enumerate(nested)
        )
    return change(path, nested)
