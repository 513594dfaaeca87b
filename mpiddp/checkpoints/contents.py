"""The contents of a checkpoint, read from its files: whole tensors, and boxes of sharded ones, mapped."""

from __future__ import annotations

import math
import random
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpiddp.checkpoints.folders import ABOUT, MAX_BYTES, SHARDS, SUFFIX, TREE, About
from mpiddp.checkpoints.resumed import Resumed
from mpiddp.checkpoints.state import Keys, ShardedValue, key_of, mapped, shown_path
from mpiddp.checkpoints.tensor_files import read_saved, read_tensors, reason_of, unpacked
from mpiddp.errors import JobFailed, UserError, cause_of
from mpiddp.files import read_limited

_NUMPY_KIND = "MT19937"  # numpy's global generator, unless a script replaces it


def read(
    files: Mapping[str, Path], rank: int = -1, *, local_rank: int = 0, held: object = None
) -> Resumed:
    """Read the files of a checkpoint, by their names, and restore the random numbers of `rank`, if any.

    The mapped tensors keep `held` alive.
    """
    folder = next(iter(files.values())).parent
    try:
        about = About.parse(read_limited(files[ABOUT], MAX_BYTES))
        saved = read_saved(files[TREE])
        tensors = [path for name, path in files.items() if name.endswith(SUFFIX)]
        state = read_boxes(saved["state"], tensors, held)
        ranks = saved["ranks"]
        of_rank = unpacked(ranks[rank].numpy().tobytes()) if 0 <= rank < len(ranks) else {}
        if of_rank:
            restore_rng_states(of_rank["rng"], local_rank)
        per_rank = of_rank.get("state", {})
        return Resumed(about, state, per_rank, ranks)
    except (UserError, JobFailed):
        raise
    except MemoryError:
        raise JobFailed(f"{folder}: out of memory while it is read.") from None
    except OSError as error:
        raise cause_of(error)(f"{folder} cannot be read: {reason_of(error)}.") from None
    except Exception as error:  # the files fit their hashes, so another program has written them
        problem = (
            f"it has no {error.args[0]}" if isinstance(error, KeyError) else "its files differ"
        )
        raise UserError(f"{folder} was not written by this version of mpiddp: {problem}.") from None


def read_boxes(tree: Any, files: Iterable[Path], held: object = None) -> Any:
    """The tree with the tensors of these files, or a `ShardedValue` in the place of a sharded one.

    Raises UserError if a box is missing, and the errors of `read_tensors`.
    """
    parts: dict[str, list[tuple[Tensor, Any]]] = defaultdict(list)
    for path in files:
        tensors, notes = read_tensors(path, held)
        tensors |= {name: tensors[first] for name, first in notes["tied"].items()}
        stem = "" if path.name.startswith(SHARDS) else f"{path.name.removesuffix(SUFFIX)}/"
        for name, tensor in tensors.items():
            parts[stem + name].append((tensor, notes["boxes"].get(name)))

    def value_of(path: Keys, leaf: Any) -> Any:
        if type(leaf) is not torch.dtype:
            return leaf
        if not parts.get(key_of(path)):
            raise UserError(f"{shown_path(path)} is in none of its files.")
        return _joined(path, parts[key_of(path)], leaf)

    return mapped(tree, value_of)


def _joined(path: Keys, parts: Sequence[tuple[Any, Any]], dtype: torch.dtype) -> Any:
    """The tensor that has these parts, each with its place. `dtype`: its type, if its file has only bytes."""
    boxes: dict[tuple[int, ...], Tensor] = {}  # by offsets, because replicas may repeat them
    for tensor, place in parts:
        if place is None:
            return tensor
        shape, offsets, own_shape, placements = place
        box = tensor.view(dtype).view(own_shape)
        if offsets is None:
            return box if own_shape == shape else box.expand(shape)
        boxes[tuple(offsets)] = box
    size = sum(box.numel() for box in boxes.values())
    if size != math.prod(shape):
        raise UserError(f"{shown_path(path)} has {size} elements of the shape {shape}.")
    rows = [(box, offsets) for offsets, box in boxes.items()]
    return ShardedValue(torch.Size(shape), rows, placements)


# Random number generators


def rng_states(local_rank: int) -> dict[str, Any]:
    """The states of Python, torch, numpy, and of each GPU if this process uses GPUs."""
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
    """Restore the states of `rng_states`.

    The GPU of this rank gets the state that the rank's GPU had, although it may have another number now.
    """
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    gpu = torch.accelerator.current_accelerator()
    saved_gpus = states.get(gpu.type, []) if gpu else []
    for index in range(torch.accelerator.device_count() if saved_gpus else 0):
        saved = index - local_rank + states["local_rank"]
        if 0 <= saved < len(saved_gpus):
            torch.get_device_module(gpu).set_rng_state(saved_gpus[saved], index)
    numpy = sys.modules.get("numpy")
    if numpy and "numpy" in states:
        keys, *rest = states["numpy"]
        numpy.random.set_state((_NUMPY_KIND, keys.numpy().astype("uint32"), *rest))
