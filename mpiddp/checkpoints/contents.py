"""The contents of a checkpoint, read from its files: whole tensors, and boxes of sharded ones, mapped.

Earlier versions wrote files of torch.save, and shards with the paths of their tensors:

    model.pt         the entry "model"; None in the places of tensors in shards
    ranks.pt         what each rank has saved for itself
    shard_00001.pt   {"[\"model\", \"fc.weight\"]": {"shape": [10, 64], "offsets": [5, 0], "box": …}, …}
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpiddp.checkpoints.files import read_saved, read_tensors, reason_of, unpacked
from mpiddp.checkpoints.folder import FACTS, SHARDS, SUFFIX, TREE, Facts, stem_of
from mpiddp.checkpoints.resumed import Resumed, ShardedValue
from mpiddp.checkpoints.state import Keys, key_of, mapped, shown_path
from mpiddp.errors import JobFailed, UserError, cause_of

_NUMPY_KIND = "MT19937"  # of numpy's global generator, unless a script replaces it


def read(files: Mapping[str, Path], rank: int = -1, *, local_rank: int = 0) -> Resumed:
    """Read the files of a checkpoint, given by their names, and restore the generators of `rank`, if any."""
    place = next(iter(files.values())).parent
    try:
        facts = Facts.read(files[FACTS])
        if TREE in files:
            saved = read_saved(files[TREE])
            tensors = [path for name, path in files.items() if name.endswith(SUFFIX)]
            saved["state"] = read_boxes(saved["state"], tensors)
        else:
            saved = read_old(files, facts.keys)
        ranks = saved["ranks"]
        own = unpacked(ranks[rank].numpy().tobytes()) if 0 <= rank < len(ranks) else {}
        if own:
            restore_rng_states(own["rng"], local_rank)
        beside = len(ranks), facts.config, facts, ranks
        return Resumed(facts.step, saved["state"], own.get("state", {}), *beside)
    except (UserError, JobFailed):
        raise
    except MemoryError:
        raise JobFailed(f"{place}: out of memory while it is read.") from None
    except OSError as error:
        raise cause_of(error)(f"{place} cannot be read: {reason_of(error)}.") from None
    except Exception as error:  # files that fit their hashes, of another program
        what = f"it has no {error.args[0]}" if isinstance(error, KeyError) else "its files differ"
        raise UserError(f"{place} was not written by mpiddp: {what}.") from None


def read_boxes(tree: Any, files: Iterable[Path]) -> Any:
    """The tree with the tensors of these files: a whole one as it is, others as `ShardedValue`.

    Raises UserError if a box is missing; what `read_tensors` raises.
    """
    found: dict[str, list[tuple[Tensor, Any]]] = defaultdict(list)
    layouts: dict[str, str] = {}
    for path in files:
        tensors, beside = read_tensors(path)
        tensors |= {name: tensors[first] for name, first in beside["tied"].items()}
        stem = "" if path.name.startswith(SHARDS) else f"{path.name.removesuffix(SUFFIX)}/"
        layouts |= {stem + name: layout for name, layout in beside["layouts"].items()}
        for name, tensor in tensors.items():
            found[stem + name].append((tensor, beside["boxes"].get(name)))

    def value_of(path: Keys, leaf: Any) -> Any:
        if type(leaf) is not torch.dtype:
            return leaf
        parts = found.get(key_of(path))
        if not parts:
            raise UserError(f"{shown_path(path)} is in none of its files.")
        value = joined(path, parts, leaf)
        if layout := layouts.get(key_of(path)):
            return value.contiguous(memory_format=getattr(torch, layout))
        return value

    return mapped(tree, value_of)


def joined(path: Keys, parts: Sequence[tuple[Any, Any]], dtype: torch.dtype | None = None) -> Any:
    """The value of these parts, each with the shape of the whole, its offsets, and its own shape; or None.

    `dtype`: that of tensors whose files have them as bytes.
    """
    boxes: dict[tuple[int, ...], Tensor] = {}  # by offsets, because replicas may repeat them
    for tensor, about in parts:
        if about is None:
            return tensor
        shape, offsets, part = about
        box = tensor.view(dtype or tensor.dtype).view(part)
        if offsets is None:
            return box if part == shape else box.expand(shape)
        boxes[tuple(offsets)] = box
    has = sum(box.numel() for box in boxes.values())
    if has != math.prod(shape):
        raise UserError(f"{shown_path(path)} has {has} elements of the shape {shape}.")
    return ShardedValue(torch.Size(shape), [(box, at) for at, box in boxes.items()])


def read_old(files: Mapping[str, Path], keys: Sequence[str]) -> dict[str, Any]:
    """The contents of an old checkpoint, as tree.pt has them today: the state, and each rank's own part."""
    state = {key: read_saved(files[f"{stem_of(key)}.pt"]) for key in keys}
    boxes: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
    for name in files:
        for key, each in read_saved(files[name]).items() if name.startswith(SHARDS) else ():
            box, offsets = each["box"], None if each.get("is_plain") else each["offsets"]
            boxes[key].append((box, [each["shape"], offsets, box.shape]))

    def value_of(path: Keys, value: Any) -> Any:
        parts = boxes.get(json.dumps(path)) if value is None else None
        return joined(path, parts) if parts else value

    return {"state": mapped(state, value_of), "ranks": read_saved(files["ranks.pt"])}


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

    The GPU of the local rank gets the state of the rank's earlier one, which may have another number.
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
