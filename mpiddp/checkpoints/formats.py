"""Checkpoints of other programs, written and read: torch.distributed.checkpoint (DCP), and safetensors.

    mpiddp checkpoints export --to safetensors runs/a out      # out/model.safetensors, …
    mpiddp.load("out")

Both are read without code: torch's own reader of DCP unpickles whatever stands in the file. The format of
safetensors is a length, a header in JSON, and the bytes of the tensors, so no package is needed for it.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
import warnings
from base64 import b64decode, b64encode
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpiddp.checkpoints.shards import ShardedValue
from mpiddp.checkpoints.state import Keys, load, mapped, packed, stem_of, unpacked
from mpiddp.errors import UserError, cause_of

_SUFFIX = ".safetensors"
_MAX_HEADER = 1 << 28
_DAMAGE = (ValueError, LookupError, TypeError, AttributeError, RecursionError, struct.error)
_NAMES = (
    "F64:float64 F32:float32 F16:float16 BF16:bfloat16 I64:int64 I32:int32 I16:int16 I8:int8 BOOL:bool "
    "U64:uint64 U32:uint32 U16:uint16 U8:uint8 F8_E4M3:float8_e4m3fn F8_E5M2:float8_e5m2 C64:complex64"
)
_TYPES = {code: getattr(torch, name) for code, name in (each.split(":") for each in _NAMES.split())}
_CODES = {dtype: code for code, dtype in _TYPES.items()}
_DCP_CLASSES = {  # all that the .metadata of DCP consists of
    "torch.distributed.checkpoint.metadata": (
        "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata MetadataIndex "
        "TensorProperties _MEM_FORMAT_ENCODING StorageMeta"
    ),
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
    "torch.serialization": "_get_layout",
    "torch": "Size",
    "pathlib": "PosixPath PurePosixPath",
}


def write_foreign(to: str, state: Mapping[str, Any], new: Path) -> None:
    """Write the state, with whole tensors, into the folder `new`. Raises OSError, or UserError."""
    if to == "dcp":
        import torch.distributed.checkpoint as dcp

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this is one process
            dcp.save(dict(state), checkpoint_id=new, no_dist=True)
        return
    for key, entry in state.items():
        _write_safetensors(new / f"{stem_of(key)}{_SUFFIX}", entry)


def read_foreign(given: Path) -> dict[str, Any] | None:
    """The state in a checkpoint of another program; None if it is none. Raises UserError or JobFailed."""
    try:
        if (given / ".metadata").is_file():
            return _read_dcp(given)
        files = [given] if given.suffix == _SUFFIX else sorted(given.glob(f"*{_SUFFIX}"))
        if not files:
            return None
        return {path.stem: _read_safetensors(path) for path in files}
    except OSError as error:
        raise cause_of(error)(f"{error.filename or given}: {error.strerror or error}.") from None
    except _DAMAGE as error:
        raise UserError(
            f"{given} is damaged, or no checkpoint of DCP or safetensors: {error}."
        ) from None


# DCP


class _Unpickler(pickle.Unpickler):
    """Reads the tables of DCP, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_type or name in _DCP_CLASSES.get(module, "").split():
            return super().find_class(module, name)
        raise ValueError(f"its .metadata contains {module}.{name}")


def _read_dcp(given: Path) -> dict[str, Any]:
    try:
        with (given / ".metadata").open("rb") as file:
            found = _Unpickler(file).load()
    except (pickle.UnpicklingError, EOFError) as error:
        raise ValueError(str(error)) from None
    parts = defaultdict(list)
    for index, info in found.storage_data.items():
        if "/" in info.relative_path:
            raise ValueError("it names a file outside of it")
        with (given / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            value = load(io.BytesIO(file.read(info.length)))
        parts[index.fqn].append((index.offset, value))
    state: dict[str, Any] = {}
    for name, own in parts.items():
        path = tuple((found.planner_data or {}).get(name, (name,)))
        place: Any = state
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = _joined(found.state_dict_metadata[name], own)
    return {key: _with_numbers(value) for key, value in state.items()}


def _joined(about: Any, parts: list[tuple[Any, Any]]) -> Any:
    shape = getattr(about, "size", None)
    if shape is None or (len(parts) == 1 and parts[0][1].shape == shape):
        return parts[0][1]
    boxes = [{"shape": shape, "offsets": list(offset), "box": box} for offset, box in parts]
    return ShardedValue(boxes)


def _with_numbers(nested: Any) -> Any:
    """The same with lists, and with the numbers of an optimizer's parameters as keys.

    DCP has keys that are text, and whole numbers for the places in lists.
    """
    if type(nested) is not dict:
        return nested
    rows = {key: _with_numbers(value) for key, value in nested.items()}
    if rows and all(type(key) is int for key in rows):
        return [rows[key] for key in sorted(rows)]
    if rows and all(str(key).isdigit() for key in rows):
        return {int(key): value for key, value in rows.items()}
    return rows


# safetensors


def _write_safetensors(path: Path, entry: Any) -> None:
    """Write tensors by names as "layer.weight", and the entry without them into the header."""
    leaves: dict[str, Any] = {}

    def taken(keys: Keys, value: Any) -> Any:
        name = _name_of(keys, path)
        is_tensor = isinstance(value, Tensor)
        if name in leaves or (is_tensor and value.dtype not in _CODES):
            kind = value.dtype if is_tensor else "a value"
            raise UserError(f"safetensors cannot hold {name}: {kind}, or a name twice.")
        leaves[name] = value
        return None if is_tensor else value

    tree = b64encode(packed(mapped(entry, taken))).decode()
    tensors = {name: value for name, value in leaves.items() if isinstance(value, Tensor)}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "mpiddp": tree}}
    at = 0
    # The widest first, so that all are aligned.
    ordered = sorted(tensors.items(), key=lambda each: -each[1].element_size())
    for name, value in ordered:
        end = at + value.numel() * value.element_size()
        about = {"dtype": _CODES[value.dtype], "shape": list(value.shape)}
        header[name], at = {**about, "data_offsets": [at, end]}, end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, value in ordered:
            file.write(memoryview(value.contiguous().reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]


def _read_safetensors(path: Path) -> Any:
    size = path.stat().st_size
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(_MAX_HEADER, size):
            raise ValueError("its header is longer than the file")
        header = json.loads(file.read(length))
    content = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8, device="cpu")
    tensors = {}
    metadata = header.pop("__metadata__", {})
    for name, about in header.items():
        start, end = (8 + length + each for each in about["data_offsets"])
        dtype = _TYPES[about["dtype"]]
        if not 8 + length <= start <= end <= size:
            raise ValueError(f"{name} lies outside of the file")
        part = content[start:end]
        part = part if start % dtype.itemsize == 0 else part.clone()
        tensors[name] = part.view(dtype).view(about["shape"])
    if "mpiddp" not in metadata:
        return tensors
    tree = unpacked(torch.frombuffer(bytearray(b64decode(metadata["mpiddp"])), dtype=torch.uint8))
    return mapped(tree, lambda keys, value: tensors.get(_name_of(keys, path), value))


def _name_of(keys: Keys, path: Path) -> str:
    """That of a tensor in the entry that the file holds."""
    return ".".join(map(str, keys)) or path.stem
