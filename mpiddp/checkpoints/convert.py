"""`mpiddp checkpoints convert FOLDER OUT`: a sharded checkpoint as a whole one, and back.

    runs/a/checkpoints/step_00001000/          whole/
        shard_00000.pt, shard_00001.pt, …          model.pt, trainer.pt    of mpiddp train
        replicated.pt, shards.json           ◄─►   or state.pt             of mpiddp.Checkpoints
        ranks.pt, state.json                       ranks.pt, state.json

Both are complete checkpoints with a manifest. `torch.load("whole/model.pt")` is a plain state_dict. Back,
all tensors lie in the file of rank 0, from which any number of ranks load their shards.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mpiddp.checkpoints import directory
from mpiddp.checkpoints.contents import read_state, read_tensors
from mpiddp.checkpoints.directory import BrokenCheckpoint
from mpiddp.checkpoints.manifest import Entry, UnreadableCheckpoint
from mpiddp.checkpoints.shards import index as shard_index
from mpiddp.checkpoints.shards.index import (
    DTYPES,
    INDEX,
    Chunk,
    SavedTensor,
    ShardIndex,
    file_of,
    name_of,
)
from mpiddp.checkpoints.shards.read import ShardFiles
from mpiddp.checkpoints.shards.state import mapped
from mpiddp.checkpoints.tensor_file import write_tensors
from mpiddp.errors import JobFailed, UserError
from mpiddp.paths import cause_of, read_error

_REPLICATED = "replicated"


@dataclass(frozen=True)
class _Kind:
    """A program's checkpoints: its files of tensors, and the path of the parameters in them."""

    files: tuple[str, ...]  # of a whole checkpoint
    is_nested: bool  # whether replicated.pt has the contents of several files, by name


_TRAIN = _Kind(("model", "trainer"), is_nested=True)
_SCRIPT = _Kind(("state",), is_nested=False)


def convert(folder: Path, out: Path) -> str:
    """Write the checkpoint in `folder` in its other form to `out`, and return what was written.

    Raises:
        UserError: no valid checkpoint there, a file of shards is on another host, `out` exists.
        JobFailed: a disk has failed.
    """
    if out.exists():
        raise UserError(f"{out} exists already. Name a new folder.")
    try:
        files = directory.listed(folder)
        directory.verify(folder)
        index = shard_index.read(folder)
    except UnreadableCheckpoint as error:
        raise JobFailed(f"{folder}: {error}.") from None
    except BrokenCheckpoint as error:
        raise UserError(f"{folder}: {error}.") from None
    except OSError as error:
        raise read_error(f"{folder}: {INDEX}", error) from None
    kind = _SCRIPT if _is_of_script(folder) else _TRAIN
    if index is None and kind is _SCRIPT:
        raise UserError(
            f"{folder} is a whole checkpoint of mpiddp.Checkpoints, whose load_into shards tensors "
            "itself. It needs no conversion."
        )
    contents = _whole(folder, kind) if index is None else _gathered(folder, kind, index, files)
    try:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        directory.write_folder(
            out.absolute(), lambda new: _write(new, folder, kind, contents, shards=index is None)
        )
    except OSError as error:
        raise cause_of(error)(f"{out} cannot be written: {error.strerror}.") from None
    if index is None:
        return f"{out}: in shards, for any number of ranks"
    return f"{out}: whole, with {', '.join(f'{name}.pt' for name in kind.files)}"


def _is_of_script(folder: Path) -> bool:
    return "written_by" in _facts(folder)


def _facts(folder: Path) -> dict[str, Any]:
    if facts := read_state(folder):
        return facts
    raise UserError(f"{folder}: its state.json is missing or foreign.")


def _whole(folder: Path, kind: _Kind) -> dict[str, Any]:
    """The contents of a whole checkpoint, by file."""
    return {name: read_tensors(folder, f"{name}.pt") for name in kind.files}


def _gathered(
    folder: Path, kind: _Kind, index: ShardIndex, files: dict[str, Entry]
) -> dict[str, Any]:
    """The contents of a sharded checkpoint with whole tensors, by file."""
    if lacking := index.lacking(files):
        raise UserError(
            f"{folder} lacks {lacking[0]}: each host keeps the shards of two hosts. Copy the shards of the "
            "others here, or resume the run on its hosts."
        )
    state = read_tensors(folder, f"{_REPLICATED}.pt")
    state = state if kind.is_nested else {"state": state}
    if not isinstance(state, dict) or set(state) != set(kind.files):
        raise UserError(f"{folder}: {_REPLICATED}.pt has other contents.")
    shards = ShardFiles(index, dict.fromkeys(index.files, folder))
    found: dict[str, Any] = shards.into(state, lambda _: None)
    return found


def _write(
    new: Path, folder: Path, kind: _Kind, contents: dict[str, Any], *, shards: bool
) -> dict[str, str]:
    """Write the files of the other form, and return the SHA-256 of the large ones."""
    hashes: dict[str, str] = {}
    facts = _facts(folder)
    if shards:
        contents, index = _write_shards(new, contents, hashes)
        (new / INDEX).write_text(index.as_json())
        contents = {_REPLICATED: contents}
    hashes.update(write_tensors(new, contents))
    hashes.update(write_tensors(new, {"ranks": read_tensors(folder, "ranks.pt")}))
    if kind is _TRAIN and isinstance(facts.get("config"), dict):
        facts["config"]["parallel"] = "fsdp" if shards else "ddp"
    (new / "state.json").write_text(json.dumps(facts, indent=1))
    return hashes


def _write_shards(
    new: Path, contents: dict[str, Any], hashes: dict[str, str]
) -> tuple[dict[str, Any], ShardIndex]:
    """Write the tensors of parameters into the file of rank 0, and return the rest and the index."""
    tensors: dict[str, Tensor] = {}

    def take(path: tuple[Any, ...], value: Any) -> Any:
        if not _is_parameter(value):
            return value
        tensors[name_of(path)] = value
        return None

    rest = mapped(contents, take)
    file = file_of(0)
    hashes.update(write_tensors(new, {file.removesuffix(".pt"): tensors}))
    saved = {
        name: SavedTensor(
            tuple(tensor.shape),
            _dtype_of(tensor),
            (Chunk((0,) * tensor.ndim, tuple(tensor.shape), 0),) if tensor.numel() else (),
        )
        for name, tensor in tensors.items()
    }
    entry = Entry((new / file).stat().st_size, hashes[file])
    return rest, ShardIndex(saved, {file: entry})


def _is_parameter(value: object) -> bool:
    """Whether to store the tensor as a shard. A buffer or a counter is loaded equally well as one."""
    return isinstance(value, Tensor) and value.ndim > 0 and _dtype_of(value) in DTYPES


def _dtype_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
