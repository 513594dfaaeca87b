"""Checkpoints of other programs: torch.distributed.checkpoint (DCP), written and read, and safetensors.

    mpiddp checkpoints export --to dcp runs/a out
    mpiddp.load("out")

Both are read without code: torch's own reader of DCP unpickles whatever stands in the file.
"""

from __future__ import annotations

import pickle
import warnings
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mpiddp.checkpoints.files import DAMAGE, SUFFIX, read_tensors, unpacked
from mpiddp.checkpoints.folder import is_checkpoint
from mpiddp.checkpoints.values import ShardedValue
from mpiddp.errors import UserError, cause_of

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


def write_dcp(state: Mapping[str, Any], new: Path) -> None:
    """Write the state, with whole tensors, into the folder `new`. Raises OSError."""
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is one process
        dcp.save(dict(state), checkpoint_id=new, no_dist=True)


def read_foreign(given: Path) -> dict[str, Any] | None:
    """The state in a checkpoint of another program; None if it is none. Raises UserError or JobFailed."""
    try:
        if (given / ".metadata").is_file():
            return _read_dcp(given)
        files = [given] if given.suffix == SUFFIX else sorted(given.glob(f"*{SUFFIX}"))
        if not files or is_checkpoint(given):
            return None
        return {path.stem: read_tensors(path)[0] for path in files}
    except OSError as error:
        raise cause_of(error)(f"{error.filename or given}: {error.strerror or error}.") from None
    except DAMAGE as error:
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
            value = unpacked(file.read(info.length))
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
    return ShardedValue(shape, [(box, list(offset)) for offset, box in parts])


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
