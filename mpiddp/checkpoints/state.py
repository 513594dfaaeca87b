"""The state that a program saves: one walk over it, what it may hold, the files that hold it.

A state holds whatever torch.load reads again with weights_only, and DTensors. Every value has exactly one of
the types below. A subclass, such as numpy.float64 for a float, would be saved as code, and refused when it
is read.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor

from mpiddp.errors import JobFailed, UserError, cause_of

Keys = tuple[Any, ...]  # the path to a value

RANKS = "ranks"  # the file of each rank's own state, and no key of a state
_SCALARS = (int, float, bool, str, type(None))
_DICTS = (dict, OrderedDict, Counter)  # a state_dict is an OrderedDict; MultiStepLR has a Counter
_LISTS = (list, tuple)
_LONGEST_NAME = 200  # bytes of a file's name, without its ending


def mapped(nested: Any, change: Callable[[Keys, Any], Any], path: Keys = ()) -> Any:
    """The same dicts, lists and tuples, with `change(path, value)` in place of each other value."""
    kind = type(nested)
    if kind in _DICTS:
        changed = {key: mapped(value, change, (*path, key)) for key, value in nested.items()}
        if kind is dict:
            return changed
        copied = kind(changed)
        copied.__dict__.update(nested.__dict__)  # a module's state_dict keeps its versions there
        return copied
    if kind in _LISTS:
        return kind(mapped(value, change, (*path, index)) for index, value in enumerate(nested))
    return change(path, nested)


def is_sharded(value: object) -> bool:
    """Whether the value is torch's DTensor. Does not import its modules, which takes a while."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def split(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """The state with None in place of each sharded tensor, and these tensors by their paths as JSON."""
    sharded: dict[str, Tensor] = {}

    def take(path: Keys, value: Any) -> Any:
        if not is_sharded(value):
            return value
        sharded[json.dumps(path)] = value
        return None

    return mapped(state, take), sharded


# What may be saved


def check_entries(name: str, entries: Mapping[str, Any]) -> None:
    """Check the argument `name` of a save. Raises TypeError or ValueError, see `Checkpoints.save`."""
    if not isinstance(entries, Mapping) or not all(isinstance(key, str) for key in entries):
        raise TypeError(f'{name}: expected a dict with names as keys: {{"model": …}}')

    def check(path: Keys, value: Any) -> None:
        bad = [index for index, key in enumerate(path) if type(key) not in _SCALARS]
        problem = _problem_of(value, is_shared=name == "state")
        if bad:
            problem = f"a key of type {_type_name(path[bad[0]])}. Use strings or numbers as keys"
            path = path[: bad[0]]
        if problem:
            shown = "".join(f"[{key!r}]" for key in path)
            raise TypeError(f"{name}{shown}: {problem}.")

    mapped(dict(entries), check)
    for key in entries if name == "state" else ():
        stem = stem_of(key)  # a file beside `ranks.pt` and the files of shards
        if not stem or len(stem) > _LONGEST_NAME or stem == RANKS or stem.startswith("shard_"):
            raise ValueError(
                f"state: the key {key[:_LONGEST_NAME]!r} cannot be the name of a file in the checkpoint. "
                "Use another one."
            )


def stem_of(key: str) -> str:
    """The name of the key's file, without ".pt": letters, digits, and % in place of anything else."""
    return quote(key, safe="")


def _problem_of(value: Any, *, is_shared: bool) -> str:
    """Why the value cannot be saved, "" if it can."""
    kind = type(value)
    if is_sharded(value):
        if not is_shared:
            return "cannot save a DTensor, which all ranks share. Save it in state"
        if any(placement.is_partial() for placement in value.placements):
            return "cannot save a DTensor whose ranks hold summands: redistribute it"
    elif kind is Tensor or kind is torch.nn.Parameter:
        if value.layout is not torch.strided:
            return f"cannot save a tensor in the layout {value.layout}"
    elif kind not in _SCALARS:
        return (
            f"cannot save {_type_name(value)}. Expected tensors, numbers, strings, None, lists and dicts "
            "of these: convert it, for example with .item(), .tolist() or .state_dict()"
        )
    return ""


def _type_name(value: object) -> str:
    kind = type(value)
    prefix = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{prefix}{kind.__qualname__}"


# Its files


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
    """Write each entry into a file of its own, NAME.pt, and return the SHA-256 of the files by name."""
    hashes = {}
    for name, nested in contents.items():
        file = HashedFile(folder / f"{name}.pt")
        torch.save(nested, file)  # type: ignore[arg-type]
        hashes[f"{name}.pt"] = file.close()
    return hashes


def read_tensors(path: Path, *, mmap: bool = False) -> Any:
    """The contents of a checkpoint's file, with tensors on the CPU. With `mmap`, each is read when used.

    Raises UserError if it is missing, must not be read, or is no such file: it contains code, for example;
    JobFailed if a disk has failed.
    """
    try:
        with path.open("rb"):  # torch words the errors of a path in its own way
            return _load(str(path), mmap=mmap)
    except OSError as error:
        raise cause_of(error)(f"{path} cannot be read ({error.strerror}).") from None
    except ValueError as error:
        raise UserError(f"{path} was not written by mpiddp: {error}.") from None


def packed(nested: Any) -> bytes:
    """The bytes of a file with these contents."""
    file = io.BytesIO()
    torch.save(nested, file)
    return file.getvalue()


def unpacked(data: Tensor) -> Any:
    """The contents of a file with these bytes, uint8 [bytes]. The tensors are on the CPU."""
    return _load(io.BytesIO(data.numpy().tobytes()))


def _load(file: Any, *, mmap: bool = False) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of code that it then refuses
        try:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
        except Exception as error:  # a dozen types, for files with changed, missing or random bytes
            if isinstance(error, OSError) and error.errno and cause_of(error) is JobFailed:
                raise  # not of the bytes, which make torch seek to no position at most
            raise ValueError("torch.load(weights_only=True) refuses it") from None
