"""Checkpoints outside of a run: read beside it, read from other programs, and exported for them.

The formats of other programs are safetensors and torch.distributed.checkpoint (DCP). They are read without
code: torch's own reader of DCP unpickles whatever stands in the file.
"""

from __future__ import annotations

import os
import pickle
import warnings
import weakref
from collections import defaultdict
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from mpiddp.checkpoints import folder
from mpiddp.checkpoints.boxes import write_whole
from mpiddp.checkpoints.contents import joined, read
from mpiddp.checkpoints.files import DAMAGE, read_tensors, unpacked
from mpiddp.checkpoints.folder import SUFFIX, TREE, BrokenCheckpoint, Facts, stem_of
from mpiddp.checkpoints.resumed import Resumed, placed
from mpiddp.checkpoints.retention import hold
from mpiddp.errors import JobFailed, UserError, cause_of

_MAX_RELISTS = 1000  # of a run that removes checkpoints faster than they are opened
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


def load(path: str | os.PathLike[str]) -> Resumed:
    """Read a checkpoint in any process, beside the run that writes there, for example to evaluate it.

        saved = mpiddp.load("runs/a")
        saved.load_into(model=model)

    Every byte is verified. The run keeps the checkpoint as long as the returned value lives. The call
    changes nothing, needs no other rank, and restores no random numbers.

    Args:
        path: the folder of a run, of which the newest finite checkpoint is read; a checkpoint, also of
            torch.distributed.checkpoint; a .safetensors file, or a folder of them, each of which becomes an
            entry.

    Returns:
        The checkpoint, with `per_rank` empty; of another program, with step 0.

    Raises:
        UserError: no verified checkpoint there.
        JobFailed: a disk has failed, or memory is short.
    """
    given = Path(path)
    if (state := _read_foreign(given)) is not None:
        return Resumed(0, state)
    for _ in range(_MAX_RELISTS):
        problems = []
        # The newest finite one first.
        found = sorted(folder.checkpoints_at(given), key=lambda at: not Facts.of(at).not_finite)
        for each in reversed(found):
            try:
                held = hold(each)
                listed = folder.verify(each)
                if listed.lacking:
                    raise BrokenCheckpoint(each, f"{listed.lacking[0]} is on another host")
                saved = read({name: each / name for name in listed.here})
            except (BrokenCheckpoint, UserError) as error:
                problems.append(error)
                continue
            except (FileNotFoundError, BlockingIOError):  # the run removes it just now
                break
            weakref.finalize(saved, held.close)
            return saved
        else:
            first = problems[0]
            kind = JobFailed if getattr(first, "is_failure", False) else UserError
            raise kind(f"{first}".rstrip(".") + ".")
    raise JobFailed(f"{given}: its run removes each checkpoint before it can be opened.")


def _read_foreign(given: Path) -> dict[str, Any] | None:
    """The state of another program's checkpoint; None if it is not one. Raises UserError or JobFailed."""
    try:
        if (given / ".metadata").is_file():
            return _read_dcp(given)
        files = [given] if given.suffix == SUFFIX else sorted(given.glob(f"*{SUFFIX}"))
        if not files or folder.is_checkpoint(given):
            return None
        return {path.stem: read_tensors(path)[0] for path in files}
    except OSError as error:
        raise cause_of(error)(f"{error.filename or given}: {error.strerror or error}.") from None
    except DAMAGE as error:
        raise UserError(
            f"{given} is damaged, or no checkpoint of DCP or safetensors: {error}."
        ) from None


class _Unpickler(pickle.Unpickler):
    """Reads the tables of DCP, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_type or name in _DCP_CLASSES.get(module, "").split():
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):  # Python 3.11.0 to 3.11.3 writes it so
            return _member
        raise ValueError(f"its .metadata contains {module}.{name}")


def _member(kind: Any, name: str) -> Any:
    """The member of an enumeration of DCP. Raises ValueError for anything else."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise ValueError(f"its .metadata contains {kind!r}.{name}")
    return kind[name]


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
        about, shape = None, getattr(found.state_dict_metadata[index.fqn], "size", None)
        if shape is not None:
            offsets = None if value.shape == shape else list(index.offset)
            about = [list(shape), offsets, list(value.shape)]
        parts[index.fqn].append((value, about))
    state: dict[str, Any] = {}
    for name, each in parts.items():
        path = tuple((found.planner_data or {}).get(name, (name,)))
        place: Any = state
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = joined(path, each)
    return {key: _with_numbers(value) for key, value in state.items()}


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


def export(given: Path, out: Path, to: str) -> Resumed:
    """Write what `load` reads, with every tensor in one piece, to the new folder `out`. Returns it.

    "torch" writes a file of torch.save for each entry: `torch.load("out/model.pt")` is a plain state_dict.
    "dcp" is for torch.distributed.checkpoint. "safetensors" is a checkpoint from which a run resumes, with a
    file for each entry. Raises UserError or JobFailed.
    """
    if out.exists():
        raise UserError(f"{out} exists already. Name a new folder.")
    saved = load(given)
    state = placed(saved.state, {})
    try:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        with folder.appearing(out.absolute()) as new:
            if to == "dcp":
                import torch.distributed.checkpoint as dcp

                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # that this is one process
                    dcp.save(state, checkpoint_id=new, no_dist=True)
            elif to == "torch":
                for key, entry in state.items():
                    torch.save(entry, new / f"{stem_of(key)}.pt")
            else:
                torch.save({"state": write_whole(state, new), "ranks": saved._ranks}, new / TREE)
                saved._facts.write(new)
                folder.seal(new, {})
    except OSError as error:
        raise cause_of(error)(f"{out} cannot be written: {error.strerror}.") from None
    return saved
