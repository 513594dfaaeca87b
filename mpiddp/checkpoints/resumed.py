"""What a script finds in a checkpoint, and how it loads it into its model and optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mpiddp.checkpoints.shards import with_tensors
from mpiddp.checkpoints.state import is_sharded, mapped
from mpiddp.errors import UserError

_MAX_REASON = 300  # characters of torch's list of tensors that do not fit
_ERRORS = (
    *(RuntimeError, ValueError, LookupError, TypeError, AttributeError),
    *(NotImplementedError, AssertionError),
)


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


def _like(target: Any) -> Callable[[tuple[Any, ...]], Tensor | None]:
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


def _sharded_like(entry: Any, like: Callable[[tuple[Any, ...]], Tensor | None]) -> Any:
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
