"""The contents of a checkpoint: read from the files of this host, and loaded."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mpiddp.checkpoints.files import read_saved, reason_of, unpacked
from mpiddp.checkpoints.fit import Fit
from mpiddp.checkpoints.folder import FACTS, SUFFIX, TREE, Facts
from mpiddp.checkpoints.values import read_boxes, read_old
from mpiddp.errors import JobFailed, UserError, cause_of

_MAX_REASON = 300  # characters of torch's list of tensors that do not fit
_NUMPY_KIND = "MT19937"  # of numpy's global generator, unless a script replaces it


@dataclass(frozen=True)
class Resumed:
    """A checkpoint that a script resumes from, see `Checkpoints.resume`, or reads, see `load`.

    Tensors are on the CPU, and mapped from their files: they take memory of their own only once they change.
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
    _facts: Facts = field(default=Facts(0, {}), repr=False)
    # What each rank has saved for itself.
    _ranks: list[Any] = field(default_factory=list, repr=False)

    def load_into(self, **objects: Any) -> None:
        """Call `load_state_dict` of each object with the entry of the same name.

            saved.load_into(model=model, optimizer=optimizer)

        All of them are compared with their entries before the first one changes. A tensor that is sharded in
        the object is loaded in parts, whether it was sharded when it was saved or not, and at any number of
        ranks. A module of one pipeline stage takes its own tensors. A module's names match with or without
        the prefixes of DDP and torch.compile. An optimizer's state may be by parameter names, as torch's
        `get_optimizer_state_dict` returns it, if its module is among the objects.

        Args:
            objects: by the name of their entry in `state`: modules, optimizers, anything else with a
                `load_state_dict`, or dicts of these.

        Raises:
            UserError: the checkpoint has no such entry, or that of another model.
            JobFailed: a disk has failed.
        """
        where = f"the checkpoint of step {self.step}"
        for name in objects:
            if name not in self.state:
                raise UserError(
                    f"{where} has no {name!r}. It has: {', '.join(map(repr, self.state))}."
                )
        modules = [each for each in objects.values() if isinstance(each, torch.nn.Module)]
        name, fits = "", list[Fit]()
        try:
            for name, target in objects.items():
                entry, is_partial = self.state[name], self._facts.is_partial
                fits += Fit.each(name, entry, target, modules, is_partial=is_partial)
            for fit in fits:
                name = fit.name
                fit.load()
        except JobFailed:
            raise
        except Exception as error:  # whatever a load_state_dict raises
            reason = " ".join(str(error).split())[:_MAX_REASON].rstrip(".")
            raise UserError(
                f"{where} does not fit: {name}: {reason}. "
                "Build the same as before, or name another folder."
            ) from None


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
