"""The two kinds of files with tensors: those of safetensors, and those of torch.save.

A file of safetensors is the length of a header, the header as JSON, and the bytes of the tensors. It needs no
package, any program reads it, and reading it runs no code.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import struct
import warnings
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpiddp.errors import JobFailed, UserError, cause_of, named_by

# The errors that a damaged file raises.
DAMAGE = (ValueError, LookupError, TypeError, AttributeError, RecursionError, struct.error)
_MAX_HEADER = 1 << 30
_NAMES = (
    "F64:float64 F32:float32 F16:float16 BF16:bfloat16 I64:int64 I32:int32 I16:int16 I8:int8 BOOL:bool "
    "U64:uint64 U32:uint32 U16:uint16 U8:uint8 F8_E4M3:float8_e4m3fn F8_E5M2:float8_e5m2 C64:complex64"
)
_TYPES = {code: getattr(torch, name) for code, name in (pair.split(":") for pair in _NAMES.split())}
CODES = {dtype: code for code, dtype in _TYPES.items()}


def reason_of(error: Exception) -> str:
    """The message of the system or of torch, on one line."""
    return getattr(error, "strerror", None) or str(error).partition("\n")[0]


class HashedFile:
    """A new file, and the SHA-256 of the bytes written to it, computed in the same pass."""

    def __init__(self, path: Path) -> None:
        self._file, self._digest = path.open("wb"), hashlib.sha256()

    def write(self, data: bytes | memoryview) -> None:
        self._digest.update(data)
        self._file.write(data)

    def close(self) -> str:
        """The SHA-256 of the file."""
        self._file.close()
        return self._digest.hexdigest()


def header_of(rows: Mapping[str, Any], notes: Mapping[str, Any]) -> bytes:
    """The beginning of a file: its length, a row for each tensor by its name, and the notes as JSON."""
    metadata = {"format": "pt", "mpiddp": json.dumps(notes)}
    text = json.dumps({"__metadata__": metadata, **rows}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_tensors(path: Path, header: bytes, tensors: Iterable[Tensor]) -> str:
    """Write a file with these tensors, one after another, row by row. Returns its SHA-256."""
    file = HashedFile(path)
    file.write(header)
    for tensor in tensors:
        plain = tensor.resolve_conj().resolve_neg().contiguous()  # copies only what has gaps
        flat = plain.as_strided((plain.numel(),), (1,))  # a single element may have the stride 0
        file.write(memoryview(flat.view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return file.close()


def read_tensors(path: Path, held: object = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a file, mapped, so that each is read when it is used; and the notes of its header.

    `held`, such as a lock of the file, lives as long as one of the tensors.
    Raises OSError; one of DAMAGE for a damaged file, or one of another kind; JobFailed if memory is short.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(_MAX_HEADER, size):
            raise ValueError("its header is longer than the file")
        header = json.loads(file.read(length))
    content, tensors = _mapped(path, size), {}
    if not isinstance(content, bytearray):
        weakref.finalize(
            content, id, held
        )  # a finalizer keeps its arguments alive, and the tensors the content
    notes = json.loads(header.pop("__metadata__", {}).get("mpiddp", "{}"))
    for name, about in header.items():
        start, end = (8 + length + offset for offset in about["data_offsets"])
        dtype, shape = _TYPES[about["dtype"]], about["shape"]
        if not 8 + length <= start <= end <= size:
            raise ValueError(f"{name} lies outside of the file")
        count = math.prod(shape)
        if min(shape, default=0) < 0 or end - start != count * dtype.itemsize:
            raise ValueError(f"{name} has another size than its shape")
        part = content if start % dtype.itemsize == 0 else bytearray(content[start:end])
        at = start if part is content else 0
        # Each tensor has a storage of its own, because torch.save writes whole storages.
        tensors[name] = (
            torch.frombuffer(part, dtype=dtype, count=count, offset=at).view(shape)
            if count
            else torch.empty(shape, dtype=dtype, device="cpu")
        )
    return tensors, notes


def _mapped(path: Path, size: int) -> Any:
    """The bytes of a file. Changes of them are seen in this process only."""
    try:  # the module mmap would keep the file open
        whole = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8, device="cpu")
        return whole.numpy()
    except RuntimeError as error:
        _raise_if_memory_is_short(error)
        return bytearray(path.read_bytes())  # some file systems cannot map files


def _raise_if_memory_is_short(error: Exception) -> None:
    if isinstance(error, MemoryError) or "annot allocate memory" in str(error):
        raise JobFailed("out of memory while a checkpoint is read.") from None


# torch.save


def packed(nested: Any) -> bytes:
    """The bytes of a file of torch.save with these contents."""
    file = io.BytesIO()
    torch.save(nested, file)
    return file.getvalue()


def read_saved(path: Path) -> Any:
    """The contents of a file of torch.save, with tensors on the CPU, mapped.

    Raises UserError if it is missing, must not be read, or is no such file: it contains code, for example;
    JobFailed if a disk has failed, or memory is short.
    """
    try:
        with named_by(""), path.open("rb"):  # torch words the errors of a path in its own way
            return _load(str(path), mmap=True)
    except ValueError as error:
        raise UserError(f"{path} was not written by mpiddp: {error}.") from None


def unpacked(data: bytes) -> Any:
    """The contents of a file with these bytes, with tensors on the CPU. Raises ValueError, JobFailed."""
    return _load(io.BytesIO(data))


def _load(file: Any, *, mmap: bool = False) -> Any:
    """The contents that torch.load reads without running code. Raises ValueError, OSError, JobFailed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of code that it then refuses
        try:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
        except Exception as error:  # torch raises a dozen types for damaged files
            _raise_if_memory_is_short(error)
            if isinstance(error, OSError) and error.errno and cause_of(error) is JobFailed:
                raise  # the disk has failed: damaged bytes can only make torch seek to a wrong position
            if mmap:  # some file systems cannot map files
                return _load(file)
            raise ValueError("torch.load(weights_only=True) refuses it") from None
