"""The state that a program saves: one walk over it, what it may hold, the files that hold it.

A state holds whatever torch.load reads again with weights_only, and DTensors. Every value has exactly one of
the types below. A subclass, such as numpy.float64 for a float, would be saved as code, and refused when it
is read. The files are those of torch.save, written beside the training.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import sys
import threading
import time
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import torch
from torch import Tensor

from mpiddp.errors import JobFailed, UserError, cause_of

Keys = tuple[Any, ...]  # the path to a value

RANKS = "ranks"  # the file of each rank's own state, and no key of a state
_SCALARS = (int, float, bool, str, type(None))
DICTS = (dict, OrderedDict, Counter)  # a state_dict is an OrderedDict; MultiStepLR has a Counter
LISTS = (list, tuple)
_LONGEST_NAME = 200  # bytes of a file's name, without its ending
# The thread of a save holds the interpreter for a turn, then leaves it to the training for so many turns.
# A turn is below the 5 ms of sys.getswitchinterval, and long, because each one makes the training wait once.
_TURN_S, _REST_TURNS = 0.004, 12
_NAMES = "float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool"
PLAIN_TYPES = {getattr(torch, name) for name in _NAMES.split()}  # with nothing but their elements


def mapped(nested: Any, change: Callable[[Keys, Any], Any], path: Keys = ()) -> Any:
    """The same dicts, lists and tuples, with `change(path, value)` in place of each other value."""
    kind = type(nested)
    if kind in DICTS:
        changed = {key: mapped(value, change, (*path, key)) for key, value in nested.items()}
        if kind is dict:
            return changed
        copied = kind(changed)
        copied.__dict__.update(nested.__dict__)  # a module's state_dict keeps its versions there
        return copied
    if kind in LISTS:
        return kind(mapped(value, change, (*path, index)) for index, value in enumerate(nested))
    return change(path, nested)


def is_sharded(value: object) -> bool:
    """Whether the value is torch's DTensor. Does not import its modules, which takes a while."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


# What may be saved


class Outline:
    """What a rank saves: the state with `...` in place of its tensors; these, and their paths, in order."""

    def __init__(self, name: str, entries: Mapping[str, Any]) -> None:
        """Check the argument `name` of a save. Raises TypeError or ValueError, see `Checkpoints.save`."""
        if not isinstance(entries, Mapping) or not all(isinstance(key, str) for key in entries):
            raise TypeError(f'{name}: expected a dict with names as keys: {{"model": …}}')
        self._name = name
        self.paths, self.tensors = list[Keys](), list[Tensor]()
        self.tree = mapped(dict(entries), self._take)
        for key in entries if name == "state" else ():
            stem = stem_of(key)  # a file beside `ranks.pt` and the files of shards
            if not stem or len(stem) > _LONGEST_NAME or stem == RANKS or stem.startswith("shard_"):
                raise ValueError(
                    f"state: the key {key[:_LONGEST_NAME]!r} cannot be the name of a file in the checkpoint. "
                    "Use another one."
                )

    def _take(self, path: Keys, value: Any) -> Any:
        bad = [index for index, key in enumerate(path) if type(key) not in _SCALARS]
        problem = _problem_of(value, is_shared=self._name == "state")
        if bad:
            problem = f"a key of type {_type_name(path[bad[0]])}. Use strings or numbers as keys"
            path = path[: bad[0]]
        if problem:
            raise TypeError(f"{shown_path(path, self._name)}: {problem}.")
        if type(value) in _SCALARS:
            return value
        self.paths.append(path)
        self.tensors.append(value)
        return ...

    def filled(self, values: Iterable[Any]) -> dict[str, Any]:
        """The state with these in the places of its tensors."""
        rest = iter(values)
        filled: dict[str, Any] = mapped(
            self.tree, lambda _, value: next(rest) if value is ... else value
        )
        return filled


def shown_path(path: Keys, name: str = "state") -> str:
    """The path for a sentence: state['model']['fc.weight']."""
    return name + "".join(f"[{key!r}]" for key in path)


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
        if value.is_meta:
            return "cannot save a tensor on meta, which has no values"
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

    `close` raises an error of the disk, because a writer such as torch's would replace it by another.
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


class Pickled:
    """A file of torch.save, of which the pickle is made, and the values of the tensors are still to be read.

    With `hurry`, the thread leaves the interpreter to the training most of the time until that is set.
    """

    def __init__(self, nested: Any, *, hurry: threading.Event | None = None) -> None:
        self._nested, data = nested, io.BytesIO()
        pickler = _Pickler(data, hurry)
        pickler.dump(nested)
        self._pickle, self._storages = data.getvalue(), pickler.storages

    def write(self, file: Any) -> None:
        """Write it, with a large write for each storage."""
        if (
            torch.save.__module__ != "torch.serialization"
        ):  # a drill, which breaks saves in the middle
            torch.save(self._nested, file)
            return
        writer = torch._C.PyTorchFileWriter(file)
        for name, content in (("data.pkl", self._pickle), ("byteorder", sys.byteorder.encode())):
            writer.write_record(name, content, len(content))
        for name, storage in self._storages.items():
            writer.write_record(f"data/{name}", storage, storage.nbytes())  # type: ignore[arg-type]
        writer.write_end_of_file()

    def write_hashed(self, path: Path) -> str:
        """Write a new file, and return its SHA-256."""
        file = HashedFile(path)
        self.write(file)
        return file.close()


class _Stored(NamedTuple):
    """A storage of the file, in the pickle: the same object each time, which is written once."""

    reference: tuple[Any, ...]


class _Pickler(pickle.Pickler):
    """Pickles as torch.save does, tensors in a tenth of its time."""

    def __init__(self, file: io.BytesIO, hurry: threading.Event | None) -> None:
        super().__init__(file, protocol=2)  # that of torch.save
        self.storages: dict[str, torch.UntypedStorage] = {}
        self._known: dict[Any, _Stored] = {}  # those of the storages, by address and type
        self._places: dict[Any, Any] = {}  # shapes and strides: the same objects are written once
        self._hurry, self._turn = hurry, time.monotonic()

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        kind = type(value)
        if kind is _Stored:
            return value.reference  # type: ignore[no-any-return]
        if kind is torch.TypedStorage:
            return self._stored(value._untyped_storage, value.dtype).reference
        if kind is torch.UntypedStorage:  # of types that have no legacy class, such as fp8
            return self._stored(value, None).reference
        return None

    def reducer_override(self, value: Any) -> Any:
        took = time.monotonic() - self._turn
        if self._hurry is not None and took > _TURN_S:
            self._hurry.wait(_REST_TURNS * took)
            self._turn = time.monotonic()
        if type(value) is not Tensor or value.dtype not in PLAIN_TYPES or value.is_neg():
            return NotImplemented
        stored = self._stored(value.untyped_storage(), value.dtype)
        place = value.shape, value.stride()
        sizes, strides = self._places.setdefault(place, (tuple(value.shape), place[1]))
        arguments = (stored, value.storage_offset(), sizes, strides, False, None)
        return torch._utils._rebuild_tensor_v2, arguments

    def _stored(self, storage: torch.UntypedStorage, dtype: torch.dtype | None) -> _Stored:
        key = storage._cdata, dtype
        if key not in self._known:
            name, kind, size = str(len(self._known)), torch.UntypedStorage, storage.nbytes()
            if dtype is not None:
                typed = torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
                kind, size = getattr(torch, typed._pickle_storage_type()), typed._size()
            self.storages[name] = storage
            self._known[key] = _Stored(("storage", kind, name, "cpu", size))
        return self._known[key]


def read_tensors(path: Path) -> Any:
    """The contents of a checkpoint's file, with tensors on the CPU, mapped: each is read when it is used.

    Raises UserError if it is missing, must not be read, or is no such file: it contains code, for example;
    JobFailed if a disk has failed, or memory is short.
    """
    try:
        with path.open("rb"):  # torch words the errors of a path in its own way
            return load(str(path), mmap=True)
    except OSError as error:
        raise cause_of(error)(f"{path} cannot be read ({error.strerror}).") from None
    except ValueError as error:
        raise UserError(f"{path} was not written by mpiddp: {error}.") from None


def packed(nested: Any) -> bytes:
    """The bytes of a file with these contents."""
    file = io.BytesIO()
    Pickled(nested).write(file)
    return file.getvalue()


def unpacked(data: Tensor) -> Any:
    """The contents of a file with these bytes, uint8 [bytes]. The tensors are on the CPU."""
    return load(io.BytesIO(data.numpy().tobytes()))


def load(file: Any, *, mmap: bool = False) -> Any:
    """What torch.load reads without code. Raises ValueError for another file, OSError, JobFailed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of code that it then refuses
        try:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
        except Exception as error:  # a dozen types, for files with changed, missing or random bytes
            if isinstance(error, MemoryError) or "annot allocate memory" in str(error):
                raise JobFailed("out of memory while a checkpoint is read.") from None
            if isinstance(error, OSError) and error.errno and cause_of(error) is JobFailed:
                raise  # not of the bytes, which make torch seek to no position at most
            if mmap:  # some file systems map no file
                return load(file)
            raise ValueError("torch.load(weights_only=True) refuses it") from None
