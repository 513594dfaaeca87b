"""The contents of a checkpoint: written into files, read from those of this host, loaded, exported.

model.pt      the entry "model" of the state; each entry has a file of its own
ranks.pt      each rank's random number generators, and what it has saved for itself
state.json    the step, the number of ranks, the entries of the state, and the program's configuration

If the state has sharded tensors, the entries have None in their places, each rank's parts are in a file of
shards, and shards.json names these files. Every other checkpoint is whole.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpiddp.checkpoints import folder
from mpiddp.checkpoints.folder import INDEX, BrokenCheckpoint
from mpiddp.checkpoints.shards import ShardedValue, with_sharded
from mpiddp.checkpoints.state import (
    RANKS,
    Keys,
    is_sharded,
    mapped,
    read_tensors,
    stem_of,
    unpacked,
    write_tensors,
)
from mpiddp.errors import JobFailed, UserError, cause_of

FACTS = "state.json"
_MAX_REASON = 300  # characters of torch's list of tensors that do not fit
_NUMPY_KIND = "MT19937"  # of numpy's global generator, unless a script replaces it


@dataclass(frozen=True)
class Resumed:
    """A checkpoint that a script resumes from, see `Checkpoints.resume`. Tensors are on the CPU.

    In the place of a sharded tensor there is a value with its `shape`, `dtype` and `full_tensor()`. Its files
    are there until the run ends.

    Attributes:
        step: the step after which it was saved.
        state: what all ranks have in common, as it was given to `Checkpoints.save`.
        per_rank: the state of this rank alone; {} if the job that saved it had no such rank.
        world_size: number of ranks of the job that saved it.
        config: that of the `Checkpoints` that saved it.
    """

    step: int
    state: dict[str, Any]
    per_rank: dict[str, Any] = field(default_factory=dict)
    world_size: int = 1
    config: Mapping[str, Any] = field(default_factory=dict)

    def load_into(self, **objects: Any) -> None:
        """Call `load_state_dict` of each object with the entry of the same name.

            saved.load_into(model=model, optimizer=optimizer)

        A tensor that is sharded in the object is loaded in parts, whether it was sharded when it was saved or
        not, and at any number of ranks.

        Args:
            objects: by the name of their entry in `state`: modules, optimizers, or anything else with a
                `load_state_dict`.

        Raises:
            UserError: the checkpoint has no such entry, or that of another model.
            JobFailed: a disk has failed.
        """
        for name, target in objects.items():
            if name not in self.state:
                raise UserError(
                    f"the checkpoint of step {self.step} has no {name!r}. "
                    f"It has: {', '.join(map(repr, self.state))}."
                )
            try:
                target.load_state_dict(_with_tensors(self.state[name], _tensors_of(target)))
            except JobFailed:
                raise
            except Exception as error:  # whatever a load_state_dict raises
                reason = " ".join(str(error).split())[:_MAX_REASON].rstrip(".")
                raise UserError(
                    f"the checkpoint of step {self.step} does not fit: {name}: {reason}. "
                    "Build the same as before, or name another folder."
                ) from None


def _tensors_of(target: Any) -> dict[Keys, Any]:
    """The tensors of a module or an optimizer, by the path to what is like them in its state."""
    if isinstance(target, torch.nn.Module):
        return {(name,): value for name, value in target.state_dict().items()}
    if isinstance(target, torch.optim.Optimizer):
        parameters = (each for group in target.param_groups for each in group["params"])
        return {("state", index): each for index, each in enumerate(parameters)}
    return {}


def _with_tensors(entry: Any, placed: Mapping[Keys, Any]) -> Any:
    """The entry with tensors that are sharded, or whole, as those of the object. Not a collective."""

    def tensor(path: Keys, value: Any) -> Any:
        like: Any = placed.get(path[:2] if len(path) == 3 else path)
        if type(value) is ShardedValue:
            return value.read_like(like) if isinstance(like, Tensor) else value.full_tensor()
        if not isinstance(value, Tensor) or not is_sharded(like) or like.shape != value.shape:
            return value
        from torch.distributed.tensor import distribute_tensor

        whole = value.to(like.device)
        return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)

    return mapped(entry, tensor)


# Its files


def write_files(
    new: Path, step: int, state: Mapping[str, Any], ranks: list[Any], config: Mapping[str, Any]
) -> dict[str, str]:
    """Write the files of a checkpoint without its shards. Returns the SHA-256 of the large ones, by name.

    `ranks` is what each rank has saved for itself, uint8 [bytes] each.
    """
    entries = {stem_of(key): value for key, value in state.items()}
    hashes = write_tensors(new, {**entries, RANKS: ranks})
    facts = {
        "written_by": "mpiddp.Checkpoints",
        "step": step,
        "world_size": len(ranks),
        "keys": list(state),
        "config": config,
    }
    (new / FACTS).write_text(json.dumps(facts, indent=1), encoding="utf-8")
    return hashes


def read(
    files: Mapping[str, Path], rank: int | None, *, local_rank: int = 0
) -> tuple[Resumed, list[Any]]:
    """Read the files of a checkpoint, given by their names, and restore the generators of `rank`.

    Returns the checkpoint for this rank, and what each rank has saved for itself.
    """
    place = next(iter(files.values())).parent
    try:
        facts = json.loads(files[FACTS].read_bytes())
        keys = [str(key) for key in facts["keys"]]
        state = {key: read_tensors(files[f"{stem_of(key)}.pt"]) for key in keys}
        if INDEX in files:
            names = json.loads(files[INDEX].read_bytes())["files"]
            state = with_sharded(state, [files[name] for name in names])
        ranks = read_tensors(files[f"{RANKS}.pt"])
        own = unpacked(ranks[rank]) if rank is not None and rank < len(ranks) else {}
        resumed = Resumed(
            int(facts["step"]), state, own.get("state", {}), len(ranks), dict(facts["config"])
        )
        if own:
            restore_rng_states(own["rng"], local_rank)
    except OSError as error:
        raise cause_of(error)(f"{files[FACTS]} cannot be read ({error.strerror}).") from None
    except (UserError, JobFailed):
        raise
    except Exception as error:  # files that fit their hashes, of another program
        what = f"it has no {error.args[0]}" if isinstance(error, KeyError) else "its files differ"
        raise UserError(f"{place} was not written by mpiddp: {what}.") from None
    return resumed, ranks


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


# Exported


def export(checkpoint: Path, out: Path) -> list[str]:
    """Write the checkpoint as a whole one to `out`, and return the names of its entries.

        runs/a/checkpoints/step_00001000/          whole/
            shard_00000.pt, shard_00001.pt, …          model.pt, optimizer.pt, …
            model.pt, optimizer.pt, shards.json   ─►   ranks.pt, state.json
            ranks.pt, state.json

    Both are complete checkpoints with a manifest, and a run resumes from either.
    `torch.load("whole/model.pt")` is a plain state_dict. Raises UserError or JobFailed.
    """
    if out.exists():
        raise UserError(f"{out} exists already. Name a new folder.")
    try:
        found = folder.verify(checkpoint)
    except BrokenCheckpoint as error:
        kind = JobFailed if error.is_failure else UserError
        raise kind(f"{checkpoint}: {error}.") from None
    if found.lacking:
        raise UserError(
            f"{checkpoint} lacks {found.lacking[0]}: each host keeps the shards of two hosts. Copy the "
            "shards of the others here, or resume the run on its hosts."
        )
    saved, ranks = read({name: checkpoint / name for name in found.here}, None)
    state = _with_tensors(saved.state, {})
    try:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        with folder.writing(out.absolute()) as (new, hashes):
            hashes.update(write_files(new, saved.step, state, ranks, saved.config))
    except OSError as error:
        raise cause_of(error)(f"{out} cannot be written: {error.strerror}.") from None
    return list(state)
