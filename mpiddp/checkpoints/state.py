"""The state that a program saves: one walk over it, what it may hold, its copy in host memory.

A state holds whatever torch.load reads again with weights_only, and DTensors. Every value has exactly one of
the types below. A subclass, such as numpy.float64 for a float, would be saved as code, and refused when it
is read.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor

Path = tuple[Any, ...]  # the keys that lead to a value

RANKS = "ranks"  # the file of each rank's own state, and no key of a state
_SCALARS = (int, float, bool, str, type(None))
_DICTS = (dict, OrderedDict, Counter)  # a state_dict is an OrderedDict; MultiStepLR has a Counter
_LISTS = (list, tuple)
_MAX_BITS = 2000  # of a whole number; torch.load reads no longer one
_MAX_DEPTH = 100
_LONGEST_PATH = 200  # characters
_LONGEST_NAME = 200  # bytes of a file's name, without its ending
_NUMPY_KIND = "MT19937"  # of numpy's global generator, unless a script replaces it
_EXPECTED = "Expected tensors, numbers, strings, None, lists and dicts of these"


class _CannotBeSaved(Exception):
    """A value at this path cannot be saved."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(reason)
        self.path = path


def mapped(nested: Any, change: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """The same dicts, lists and tuples, with `change(path, value)` in place of each other value."""
    kind = type(nested)
    if kind in _DICTS:
        _check_container(nested, path)
        changed = {key: mapped(value, change, (*path, key)) for key, value in nested.items()}
        if kind is dict:
            return changed
        copied = kind(changed)
        copied.__dict__.update(nested.__dict__)  # a module's state_dict keeps its versions there
        return copied
    if kind in _LISTS:
        _check_container((), path)
        return kind(mapped(value, change, (*path, index)) for index, value in enumerate(nested))
    return change(path, nested)


def _check_container(keys: Any, path: Path) -> None:
    if len(path) >= _MAX_DEPTH:
        raise _CannotBeSaved(path, "nested too deeply to be saved")
    for key in keys:
        if _is_too_long(key):  # repr() may refuse it too
            raise _CannotBeSaved(path, "a key is a number that is too long to be saved")
        if type(key) not in _SCALARS:
            raise _CannotBeSaved(
                path, f"a key of type {_type_name(key)}. Use strings or numbers as keys"
            )


def name_of(path: Path) -> str:
    """The name of the value at this path."""
    return json.dumps(path)


def path_of(name: str) -> Path:
    """The keys that lead to the tensor in the saved state."""
    return tuple(json.loads(name))


def is_sharded(value: object) -> bool:
    """Whether the value is torch's DTensor. Does not import its modules, which takes a while."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def split(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """The state with None in place of each sharded tensor, and these tensors by name."""
    sharded: dict[str, Tensor] = {}

    def take(path: Path, value: Any) -> Any:
        if not is_sharded(value):
            return value
        sharded[name_of(path)] = value
        return None

    return mapped(state, take), sharded


def filled(state: Any, values: Mapping[str, Any]) -> Any:
    """The state with the values at the paths that their names say."""
    if not values:
        return state
    return mapped(state, lambda path, value: values.get(name_of(path), value))


def num_bytes(nested: Any) -> int:
    """The bytes of all tensors."""
    sizes = [0]

    def count(_: Path, value: Any) -> None:
        if isinstance(value, Tensor):
            sizes.append(value.numel() * value.element_size())

    mapped(nested, count)
    return sum(sizes)


# What may be saved


def check_entries(name: str, entries: Mapping[str, Any]) -> None:
    """Check the argument `name` of a save.

    Raises:
        TypeError: it cannot be saved. The error names the path to what cannot: "state['optimizer']['lr']".
        ValueError: a key that cannot be the name of a file.
    """
    if not isinstance(entries, Mapping) or not all(isinstance(key, str) for key in entries):
        raise TypeError(f'{name}: expected a dict with names as keys: {{"model": …}}')

    def check(path: Path, value: Any) -> None:
        if name == "per_rank" and is_sharded(value):
            raise TypeError(
                "per_rank: cannot save a DTensor, which all ranks share. Save it in state."
            )
        _check(path, value)

    try:
        mapped(dict(entries), check)
    except _CannotBeSaved as error:
        path = "".join(f"[{key!r}]" for key in error.path)
        shown = path if len(path) <= _LONGEST_PATH else f"{path[:_LONGEST_PATH]}…"
        raise TypeError(f"{name}{shown}: {error}.") from None
    if name == "state":
        for key in entries:
            _check_key(key)


def stem_of(key: str) -> str:
    """The name of the key's file, without ".pt": letters, digits, and % in place of anything else."""
    return quote(key, safe="")


def _check_key(key: str) -> None:
    """Each key of the state is a file, beside `ranks.pt` and the files of shards."""
    stem = stem_of(key)
    if not stem or len(stem) > _LONGEST_NAME or stem == RANKS or stem.startswith("shard_"):
        raise ValueError(
            f"state: the key {key[:_LONGEST_NAME]!r} cannot be the name of a file in the checkpoint. "
            "Use another one."
        )


def _check(path: Path, value: Any) -> None:
    kind = type(value)
    if is_sharded(value):
        _check_sharded(path, value)
    elif kind is Tensor or kind is torch.nn.Parameter:
        _check_tensor(path, value)
    elif kind not in _SCALARS:
        reason = f"cannot save {_type_name(value)}. {_EXPECTED}{_hint(value)}"
        raise _CannotBeSaved(path, reason)
    elif _is_too_long(value):
        raise _CannotBeSaved(path, "the number is too long to be saved")


def _is_too_long(value: object) -> bool:
    return type(value) is int and value.bit_length() > _MAX_BITS


def _check_tensor(path: Path, tensor: Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise _CannotBeSaved(path, f"cannot save a tensor in the layout {tensor.layout}")
    if tensor.is_meta:
        raise _CannotBeSaved(path, "cannot save a tensor on the meta device: it has no values")
    if tensor.is_quantized:
        raise _CannotBeSaved(path, "cannot save a quantized tensor")


def _check_sharded(path: Path, tensor: Any) -> None:
    if any(placement.is_partial() for placement in tensor.placements):
        reason = "cannot save a DTensor whose ranks hold summands: redistribute it"
        raise _CannotBeSaved(path, reason)
    _check_tensor(path, tensor.to_local())


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


# Its copy in host memory, the only part of a save that a step waits for

# The last field: whether the copy's memory is pinned.
_Layout = tuple[torch.dtype, torch.Size, tuple[int, ...], bool]


class HostMemory:
    """Copies of tensors on the CPU. Each `copy` reuses the memory of the one before.

    With a GPU, the memory is pinned and the copies run on the current stream. So later steps change the
    originals only after the copies are done, and only the reader of the copies waits.
    """

    def __init__(self) -> None:
        self._free: dict[_Layout, list[Tensor]] = defaultdict(list)
        self._used: list[tuple[_Layout, Tensor]] = []
        self._copied: dict[torch.device, torch.Event] = {}

    def copy(self, nested: Any) -> Any:
        """The same dicts, lists and numbers, with copies of the tensors. Invalidates the previous copy.

        Call `wait` before reading the copies.
        """
        for layout, host in self._used:
            self._free[layout].append(host)
        self._used = []
        self._copied = {}
        copied = mapped(nested, self._copy)
        for device, event in self._copied.items():
            event.record(torch.accelerator.current_stream(device))
        return copied

    def wait(self) -> None:
        """Wait until the copies are complete; on a CPU they are at once. Their reader calls this."""
        for event in self._copied.values():
            event.synchronize()

    def _copy(self, _: Path, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        layout = _layout(value)
        free = self._free[layout]
        host = free.pop() if free else _new_like(value)
        self._used.append((layout, host))
        is_on_gpu = _is_on_gpu(value)
        if is_on_gpu and value.device not in self._copied:
            self._copied[value.device] = torch.Event(value.device)
        return host.copy_(value.detach(), non_blocking=is_on_gpu)


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


def _new_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(
        tensor, device="cpu", pin_memory=_is_on_gpu(tensor), requires_grad=False
    )


def _layout(tensor: Tensor) -> _Layout:
    return tensor.dtype, tensor.shape, tensor.stride(), _is_on_gpu(tensor)


# Random number generators


def rng_states(local_rank: int) -> dict[str, Any]:
    """The states as tensors, numbers and tuples. Each GPU has one if this process uses GPUs."""
    states: dict[str, Any] = {
        "local_rank": local_rank,
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
    }
    gpu = torch.accelerator.current_accelerator()
    if gpu and (gpus := torch.get_device_module(gpu)).is_initialized():
        states[gpu.type] = gpus.get_rng_state_all()
    if numpy := sys.modules.get("numpy"):
        kind, keys, *rest = numpy.random.get_state(legacy=True)
        if kind == _NUMPY_KIND:
            states["numpy"] = (torch.from_numpy(keys.astype("int64")), *rest)
    return states


def restore_rng_states(states: dict[str, Any], local_rank: int) -> None:
    """Restore the states of `rng_states`, as many of them as there are.

    The GPU of the local rank gets the state of the one that the rank had before, perhaps with another
    number.
    """
    if "python" in states:
        random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    gpu = torch.accelerator.current_accelerator()
    saved_gpus = states.get(gpu.type, []) if gpu else []
    for index in range(torch.accelerator.device_count() if saved_gpus else 0):
        saved = index - local_rank + states["local_rank"]
        if 0 <= saved < len(saved_gpus):
            torch.get_device_module(gpu).set_rng_state(saved_gpus[saved], index)
    if gpu and "own_gpu" in states:
        torch.get_device_module(gpu).set_rng_state(states["own_gpu"])
    numpy = sys.modules.get("numpy")
    if numpy and "numpy" in states:
        keys, *rest = states["numpy"]
        numpy.random.set_state((_NUMPY_KIND, keys.numpy().astype("uint32"), *rest))
