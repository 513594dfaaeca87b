"""The contents of a checkpoint: written into files, read from those of this host, loaded, exported.

model.pt      the entry "model" of the state; each entry has a file of its own
ranks.pt      each rank's random number generators, and what it has saved for itself
state.json    the step, the number of ranks, the entries of the state, and the program's configuration

If the state has sharded tensors, the entries have None in their places, shards.json says which part of them
lies where, and each rank's parts are in a file of shards. Every other checkpoint is whole.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpiddp.checkpoints import directory, legacy
from mpiddp.checkpoints.directory import INDEX, BrokenCheckpoint, UnreadableCheckpoint
from mpiddp.checkpoints.shards import Like, ShardFiles, read_index, with_tensors
from mpiddp.checkpoints.state import (
    RANKS,
    Unreadable,
    is_sharded,
    mapped,
    packed,
    read_tensors,
    stem_of,
    unpacked,
    write_tensors,
)
from mpiddp.errors import JobFailed, UserError
from mpiddp.paths import cause_of, read_error, read_limited

FACTS = "state.json"
WRITTEN_BY = "mpiddp.Checkpoints"
MAX_STEP = (1 << 53) - 1
_MAX_FACTS_BYTES = 16 << 20
_MAX_REASON = 300  # characters of torch's list of tensors that do not fit
_NUMPY_KIND = "MT19937"  # of numpy's global generator, unless a script replaces it
_ERRORS = (
    *(RuntimeError, ValueError, LookupError, TypeError, AttributeError),
    *(NotImplementedError, AssertionError),
)


@dataclass(frozen=True)
class Contents:
    """A checkpoint on this rank. Whole tensors are on the CPU, `ShardedValue`s are still in their files."""

    step: int
    state: dict[str, Any]
    ranks: list[Any]  # what each rank has saved for itself: `packed_rank`; a dict in older ones
    config: Mapping[str, Any]

    def resumed_by(self, rank: int) -> Resumed:
        """
        Raises:
            UserError: the rank's own state was not saved by mpiddp.
        """
        own = self._of_rank(rank, "state") if rank < len(self.ranks) else {}
        return Resumed(self.step, self.state, own, len(self.ranks))

    def restore_rng(self, rank: int, local_rank: int) -> None:
        """Restore the rank's random number generators, unless this rank did not exist.

        Raises:
            UserError: they were not saved by mpiddp.
        """
        if rank >= len(self.ranks):
            return
        states = self._of_rank(rank, "rng")
        try:
            restore_rng_states(states, local_rank)
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise UserError(
                "the checkpoint was not written by mpiddp: the states of its random number generators "
                f"cannot be restored ({type(error).__name__})."
            ) from None

    def _of_rank(self, rank: int, key: str) -> dict[str, Any]:
        own = self.ranks[rank]
        try:
            values = (unpacked(own) if isinstance(own, Tensor) else own)[key]
        except (Unreadable, *_ERRORS):  # a tensor of a hostile file may have any attributes
            values = None
        if not isinstance(values, dict):
            raise UserError(
                f"the checkpoint of step {self.step} was not written by mpiddp: {RANKS}.pt has no "
                f"{key} of rank {rank}."
            )
        return values


# Written


def packed_rank(rng: dict[str, Any], state: dict[str, Any]) -> Tensor:
    """What one rank saves for itself: uint8 [bytes].

    It can be a hundred small tensors, and no rank needs those of another. As bytes, they are rebuilt
    neither by the rank that writes them nor by the other ranks that resume.
    """
    return packed({"rng": rng, "state": state})


def write_files(folder: Path, contents: Contents) -> dict[str, str]:
    """Write the files of a checkpoint without its shards. Returns the SHA-256 of the large ones, by name.

    Raises:
        OSError: a file cannot be written, for example because the disk is full.
    """
    entries = {stem_of(key): value for key, value in contents.state.items()}
    hashes = write_tensors(folder, {**entries, RANKS: contents.ranks})
    facts = facts_of(contents.step, len(contents.ranks), list(contents.state), contents.config)
    (folder / FACTS).write_text(facts)
    return hashes


def facts_of(saved_step: int, world_size: int, keys: list[str], config: Mapping[str, Any]) -> str:
    """The contents of state.json."""
    facts = {
        "written_by": WRITTEN_BY,
        "step": saved_step,
        "world_size": world_size,
        "keys": keys,
        "config": config,
    }
    return json.dumps(facts, indent=1)


# Read


def read(files: Mapping[str, Path]) -> Contents:
    """Read the files of a checkpoint, given by their names.

    Raises:
        UserError: another program has written them.
        JobFailed: a disk has failed.
    """
    folder = _path(files, FACTS).parent
    facts = _facts(_path(files, FACTS))
    shards = None
    if INDEX in files:
        try:
            shards = ShardFiles(read_index(files[INDEX]), files)
        except BrokenCheckpoint as error:
            raise UserError(f"{folder}: {error}.") from None
        except OSError as error:
            raise read_error(str(files[INDEX]), error) from None
    try:
        if "keys" not in facts:
            return _checked(*legacy.read(facts, files, shards))
        state = {
            key: read_tensors(_path(files, f"{stem_of(key)}.pt")) for key in map(str, facts["keys"])
        }
        state = shards.as_values(state) if shards else state
        return _checked(facts, state, read_tensors(_path(files, f"{RANKS}.pt")))
    except (LookupError, TypeError, AttributeError, UnicodeError):
        sentence = f"{folder} was not written by mpiddp: its files have other contents."
        raise UserError(sentence) from None


def _path(files: Mapping[str, Path], name: str) -> Path:
    if name not in files:
        folder = next(iter(files.values())).parent if files else Path()
        raise UserError(f"{folder} is not a checkpoint of mpiddp: it has no {name}.")
    return files[name]


def _facts(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(read_limited(path, _MAX_FACTS_BYTES))
    except OSError as error:
        raise read_error(str(path), error) from None
    except (ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict) or not isinstance(facts.get("keys", []), list):
        raise UserError(
            f"{path.parent} is not a checkpoint of mpiddp: its {FACTS} is missing or foreign."
        )
    return facts


def _checked(facts: dict[str, Any], state: Any, ranks: Any) -> Contents:
    """Raises LookupError or TypeError if it was not written by mpiddp."""
    step, config = facts["step"], facts["config"]
    if type(step) is not int or not 0 <= step <= MAX_STEP:
        raise TypeError
    if not isinstance(config, dict) or not isinstance(ranks, list):
        raise TypeError
    if not all(isinstance(own, (Tensor, dict)) for own in ranks):
        raise TypeError
    return Contents(step, state, ranks, config)


# Loaded


@dataclass(frozen=True)
class Resumed:
    """A checkpoint that a script resumes from, see `Checkpoints.resume`. Tensors are on the CPU.

    In the place of a sharded tensor there is a value with its `shape`, `dtype` and `full_tensor()`. Its files
    are there until the next save.

    Attributes:
        step: the step after which it was saved.
        state: what all ranks have in common, as it was given to `Checkpoints.save`.
        per_rank: the state of this rank alone; {} if the job that saved it had no such rank.
        world_size: number of ranks of the job that saved it.
    """

    step: int
    state: dict[str, Any]
    per_rank: dict[str, Any] = field(default_factory=dict)
    world_size: int = 1

    def load_into(self, **objects: Any) -> None:
        """Call `load_state_dict` of each object with the entry of the same name.

            saved.load_into(model=model, optimizer=optimizer)

        A tensor that is sharded in the object is loaded in parts, whether it was sharded when it was saved or
        not, and at any number of ranks. Load before the first save.

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
                like = _like(target)
                entry = with_tensors(self.state[name], like)
                target.load_state_dict(_sharded_like(entry, like))
            except UserError as error:
                raise UserError(
                    f"the checkpoint of step {self.step} does not fit: {name}: {error}"
                ) from None
            except _ERRORS as error:
                reason = " ".join(str(error).split())[:_MAX_REASON].rstrip(".")
                raise UserError(
                    f"the checkpoint of step {self.step} does not fit: {name}: {reason}. "
                    "Build the same as before, or name another folder."
                ) from None


def _like(target: Any) -> Like:
    """A function from a path in the target's state to a tensor that is sharded as the one there."""
    if isinstance(target, torch.optim.Optimizer):
        parameters = [each for group in target.param_groups for each in group["params"]]
        return lambda path: _parameter_of(path, parameters)
    if not isinstance(target, torch.nn.Module):
        return lambda _: None
    own = target.state_dict()
    return lambda path: _tensor_or_none(own.get(path[0])) if len(path) == 1 else None


def _parameter_of(path: tuple[Any, ...], parameters: list[Tensor]) -> Tensor | None:
    """The parameter whose optimizer state is at the path."""
    match path:
        case ("state", int(index), _) if 0 <= index < len(parameters):
            return parameters[index]
    return None


def _tensor_or_none(value: object) -> Tensor | None:
    return value if isinstance(value, Tensor) else None


def _sharded_like(entry: Any, like: Like) -> Any:
    """The entry with a part of each whole tensor that is sharded in the object."""

    def shard(path: tuple[Any, ...], value: Any) -> Any:
        if not isinstance(value, Tensor) or is_sharded(value):
            return value
        target: Any = like(path)
        if not is_sharded(target) or target.shape != value.shape:
            return value
        from torch.distributed.tensor import distribute_tensor

        whole = value.to(target.device)
        return distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)

    return mapped(entry, shard)


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

    The GPU of the local rank gets the state of the one that the rank had before, perhaps with another
    number.
    """
    if "python" in states:
        random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    gpu = torch.accelerator.current_accelerator()
    saved_gpus = states.get(gpu.type, []) if gpu else []
    for index in range(torch.accelerator.device_count() if saved_gpus else 0):
        saved = index - local_rank + states["local_rank"]
        if 0 <= saved < len(saved_gpus):
            torch.get_device_module(gpu).set_rng_state(saved_gpus[saved], index)
    if gpu and "own_gpu" in states:
        torch.get_device_module(gpu).set_rng_state(states["own_gpu"])
    numpy = sys.modules.get("numpy")
    if numpy and "numpy" in states:
        keys, *rest = states["numpy"]
        numpy.random.set_state((_NUMPY_KIND, keys.numpy().astype("uint32"), *rest))


# Exported


def export(folder: Path, out: Path) -> list[str]:
    """Write the checkpoint in `folder` as a whole one to `out`, and return the names of its entries.

        runs/a/checkpoints/step_00001000/          whole/
            shard_00000.pt, shard_00001.pt, …          model.pt, optimizer.pt, …
            model.pt, optimizer.pt, shards.json   ─►   ranks.pt, state.json
            ranks.pt, state.json

    Both are complete checkpoints with a manifest, and a run resumes from either.
    `torch.load("whole/model.pt")` is a plain state_dict.

    Raises:
        UserError: no verified checkpoint there, a file of shards is on another host, `out` exists.
        JobFailed: a disk has failed.
    """
    if out.exists():
        raise UserError(f"{out} exists already. Name a new folder.")
    try:
        directory.verify(folder)
        files, lacking = directory.listed(folder), directory.missing_shards(folder)
    except UnreadableCheckpoint as error:
        raise JobFailed(f"{folder}: {error}.") from None
    except BrokenCheckpoint as error:
        raise UserError(f"{folder}: {error}.") from None
    if lacking:
        raise UserError(
            f"{folder} lacks {lacking[0]}: each host keeps the shards of two hosts. Copy the shards of the "
            "others here, or resume the run on its hosts."
        )
    contents = read({name: folder / name for name in files})
    whole = replace(contents, state=with_tensors(contents.state, lambda _: None))
    try:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        directory.write_folder(out.absolute(), lambda new: write_files(new, whole))
    except OSError as error:
        raise cause_of(error)(f"{out} cannot be written: {error.strerror}.") from None
    return list(whole.state)
