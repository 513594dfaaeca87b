"""The state that a program saves: one walk over it, what it may hold, the files that hold it.

A state holds whatever torch.load reads again with weights_only, and DTensors. Every value has exactly one of
the types below. A subclass, such as numpy.float64 for a float, would be saved as code, and refused when it
is read.

torch.load(weights_only=True) refuses code, but prints a page of advice on how to allow it, and reports
damage by a dozen types of exception. `load_tensors` raises one type, with a reason for the user.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import re
import struct
import sys
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

import torch
from torch import Tensor

from mpiddp.errors import JobFailed, UserError
from mpiddp.paths import cause_of, read_error

Keys = tuple[Any, ...]  # the path to a value

RANKS = "ranks"  # the file of each rank's own state, and no key of a state
_SCALARS = (int, float, bool, str, type(None))
_DICTS = (dict, OrderedDict, Counter)  # a state_dict is an OrderedDict; MultiStepLR has a Counter
_LISTS = (list, tuple)
_MAX_BITS = 2000  # of a whole number; torch.load reads no longer one
_MAX_DEPTH = 100
_LONGEST_PATH = 200  # characters
_LONGEST_NAME = 200  # bytes of a file's name, without its ending
_EXPECTED = "Expected tensors, numbers, strings, None, lists and dicts of these"


class _CannotBeSaved(Exception):
    """A value at this path cannot be saved."""

    def __init__(self, path: Keys, reason: str) -> None:
        super().__init__(reason)
        self.path = path


def mapped(nested: Any, change: Callable[[Keys, Any], Any], path: Keys = ()) -> Any:
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


def _check_container(keys: Any, path: Keys) -> None:
    if len(path) >= _MAX_DEPTH:
        raise _CannotBeSaved(path, "nested too deeply to be saved")
    for key in keys:
        if _is_too_long(key):  # repr() may refuse it too
            raise _CannotBeSaved(path, "a key is a number that is too long to be saved")
        if type(key) not in _SCALARS:
            raise _CannotBeSaved(
                path, f"a key of type {_type_name(key)}. Use strings or numbers as keys"
            )


def name_of(path: Keys) -> str:
    """The name of the value at this path."""
    return json.dumps(path)


def path_of(name: str) -> Keys:
    """The keys that lead to the tensor in the saved state."""
    return tuple(json.loads(name))


def is_sharded(value: object) -> bool:
    """Whether the value is torch's DTensor. Does not import its modules, which takes a while."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def split(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """The state with None in place of each sharded tensor, and these tensors by name."""
    sharded: dict[str, Tensor] = {}

    def take(path: Keys, value: Any) -> Any:
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

    def count(_: Keys, value: Any) -> None:
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

    def check(path: Keys, value: Any) -> None:
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


def _check(path: Keys, value: Any) -> None:
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


def _check_tensor(path: Keys, tensor: Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise _CannotBeSaved(path, f"cannot save a tensor in the layout {tensor.layout}")
    if tensor.is_meta:
        raise _CannotBeSaved(path, "cannot save a tensor on the meta device: it has no values")
    if tensor.is_quantized:
        raise _CannotBeSaved(path, "cannot save a quantized tensor")


def _check_sharded(path: Keys, tensor: Any) -> None:
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


# Its files

# The exceptions of torch.load on thousands of files with changed, missing or random bytes.
_DAMAGED = (
    pickle.UnpicklingError,
    struct.error,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


class Unreadable(Exception):
    """The file contains no tensors that can be read. The message is a phrase for a sentence."""


class HashedFile:
    """A new file, and the SHA-256 of the bytes written to it, computed in the same pass.

    `close` raises an error of the disk, because a writer such as torch.save would replace it by another.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self.name = str(path)  # as an open file's; a drill tells the files of a save apart by it
        self._digest = hashlib.sha256()
        self._error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        rest = memoryview(data)
        self._digest.update(rest)
        try:
            while rest and self._error is None:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._error = error
        return len(data)

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> str:
        """The SHA-256 of the file. Raises the first OSError of the writes."""
        self._file.close()
        if self._error is not None:
            raise self._error
        return self._digest.hexdigest()


def write_tensors(folder: Path, contents: Mapping[str, Any]) -> dict[str, str]:
    """Write each entry into a file of its own, NAME.pt, and return the SHA-256 of the files by name.

    Raises:
        OSError: a file cannot be written, for example because the disk is full.
    """
    hashes = {}
    for name, nested in contents.items():
        file = HashedFile(folder / f"{name}.pt")
        torch.save(nested, file)  # type: ignore[arg-type]
        hashes[f"{name}.pt"] = file.close()
    return hashes


def load_tensors(path: Path) -> Any:
    """The tensors, containers and numbers in the file. The tensors are on the CPU.

    Raises:
        OSError: the file is missing, must not be read, or lies on a disk that fails.
        Unreadable: the file is damaged, of another format, or contains code.
    """
    with path.open("rb") as file:
        return _load(file)


def _load(file: BinaryIO) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of code that it then refuses
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except _DAMAGED as error:
            if isinstance(error, OSError) and error.errno and cause_of(error) is JobFailed:
                raise  # not of the bytes, which make torch seek to no position at most
            if code := re.search(r"GLOBAL (\S+)", str(error)):
                raise Unreadable(f"it contains code ({code[1]}), which is refused") from None
            if isinstance(error, pickle.UnpicklingError):
                raise Unreadable("it is not a file that torch.save wrote") from None
            reason = re.split(r"\. |\n", str(error))[0] or type(error).__name__
            raise Unreadable(f"torch.load cannot read it ({reason})") from None


def packed(nested: Any) -> Tensor:
    """The bytes of a file with these contents: uint8 [bytes]."""
    file = io.BytesIO()
    torch.save(nested, file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def unpacked(data: Tensor) -> Any:
    """The contents that `packed` was given. The tensors are on the CPU.

    Raises:
        Unreadable: these are no such bytes, or contain code.
    """
    is_plain = data.layout is torch.strided and data.dtype == torch.uint8
    if not is_plain or not data.is_contiguous():  # else it may claim to be of any size
        raise Unreadable("it contains no bytes of torch.save")
    return _load(io.BytesIO(data.numpy().tobytes()))


def read_tensors(path: Path) -> Any:
    """The contents of a checkpoint's file, with errors of one sentence.

    Raises:
        UserError: it is missing, must not be read, or is no such file.
        JobFailed: a disk has failed.
    """
    try:
        return load_tensors(path)
    except OSError as error:
        raise read_error(str(path), error) from None
    except Unreadable as error:
        raise UserError(f"{path} was not written by mpiddp: {error}.") from None
