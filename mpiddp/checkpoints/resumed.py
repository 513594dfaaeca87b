"""What a script has of a checkpoint: its state, whose sharded tensors are still in their files, and loads it.

How an entry fits the object that loads it is known before anything changes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from mpiddp.checkpoints.folder import Facts
from mpiddp.checkpoints.state import Keys, as_kind_of, is_sharded, mapped, own_part, shown_path
from mpiddp.errors import JobFailed, UserError
from mpiddp.text import listed

# Of DDP, torch.compile and activation checkpointing.
_WRAPPERS = re.compile(r"^((_orig_mod|module)\.)+|\b_(orig_mod|checkpoint_wrapped_module)\.")
_FLAT = "param_groups."  # begins the keys of a flattened optimizer's state
_MAX_REASON = 300  # characters of torch's list of tensors that do not fit


@dataclass(frozen=True)
class ShardedValue:
    """A tensor that is still in its files, in `Resumed.state` in place of the tensor.

    The boxes are those of all ranks, with their offsets, in mapped files: each is read when it is used.
    """

    shape: torch.Size
    boxes: Sequence[tuple[Tensor, Sequence[int]]]

    @property
    def dtype(self) -> torch.dtype:
        """That of its elements."""
        return self.boxes[0][0].dtype

    def full_tensor(self) -> Tensor:
        """The whole tensor, on the CPU. Not a collective."""
        return self._filled(torch.empty(self.shape, dtype=self.dtype, device="cpu"))

    def read_like(self, like: Tensor) -> Tensor:
        """The tensor, placed like one of its shape. Reads only this rank's bytes. Not a collective."""
        return self._filled(torch.empty_like(like, dtype=self.dtype, requires_grad=False))

    def _filled(self, target: Tensor) -> Tensor:
        """The target, after this rank's part of it is read."""
        own, offsets = own_part(target)
        for box, at in self.boxes if own.numel() else ():
            _copy_overlap(box, at, own, offsets)
        return target


def _copy_overlap(source: Tensor, at: Sequence[int], target: Tensor, to: Sequence[int]) -> None:
    """Copy the elements that both boxes have. Their offsets in the whole tensor are `at` and `to`."""
    for dim, (first, second) in enumerate(zip(at, to, strict=True)):
        start = max(first, second)
        end = min(first + source.shape[dim], second + target.shape[dim])
        if start >= end:
            return
        source = source.narrow(dim, start - first, end - start)
        target = target.narrow(dim, start - second, end - start)
    target.copy_(source)


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
    # Of a checkpoint that is partial: the tensors of an entry that this rank has left to others.
    _left: dict[str, set[str]] = field(default_factory=dict, repr=False)

    def load_into(self, **objects: Any) -> None:
        """Call `load_state_dict` of each object with the entry of the same name.

            saved.load_into(model=model, optimizer=optimizer)

        All of them are compared with their entries before the first one changes. A tensor that is sharded in
        the object is loaded in parts, whether it was sharded when it was saved or not, and at any number of
        ranks. A module of one pipeline stage takes its own tensors; the first save refuses if no rank has
        taken one. A module's names match with or without the prefixes of DDP and torch.compile. An
        optimizer's state may be by parameter names, as torch's
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
                if fit.left is not None:
                    self._left[name] = self._left.get(name, fit.left) & fit.left
        except JobFailed:
            raise
        except Exception as error:  # whatever a load_state_dict raises
            reason = " ".join(str(error).split())[:_MAX_REASON].rstrip(".")
            raise UserError(
                f"{where} does not fit: {name}: {reason}. "
                "Build the same as before, or name another folder."
            ) from None


@dataclass
class Fit:
    """An object, and the entry that it loads, which fits it."""

    name: str
    entry: Any
    target: Any
    is_partial: bool  # some ranks had tensors that others did not
    # The object's tensors, by the path of what is like them in the entry.
    likes: dict[Keys, Any] = field(default_factory=dict)
    module: Module | None = None  # of an optimizer whose state is by names
    left: set[str] | None = None  # what is of other stages

    @classmethod
    def each(
        cls, name: str, entry: Any, target: Any, modules: Sequence[Module], *, is_partial: bool
    ) -> Iterator[Fit]:
        """One for the object, or for each object in a dict. Raises UserError if one does not fit."""
        if type(target) is dict:
            for key, each in target.items():
                if not isinstance(entry, Mapping) or key not in entry:
                    raise UserError(f"it has no {key!r}")
                own = f"{name}[{key!r}]", entry[key], each
                yield from cls.each(*own, modules, is_partial=is_partial)
            return
        fit = cls(name, entry, target, is_partial)
        if isinstance(target, Module):
            fit._match_module()
        elif isinstance(target, Optimizer):
            fit._match_optimizer(modules)
        elif callable(getattr(target, "state_dict", None)):
            fit.likes = _tensors_in(target.state_dict())
        mapped(fit.entry, fit._check_tensor)
        yield fit

    def load(self) -> None:
        """Load the entry. Not a collective, unless the object's own `load_state_dict` is one."""
        is_module = isinstance(self.target, Module)
        state = placed(self.entry, self.likes, owns=not is_module)
        if self.module is not None:
            from torch.distributed.checkpoint import state_dict as torch_states

            options = torch_states.StateDictOptions(
                flatten_optimizer_state_dict=_is_flat(self.entry)
            )
            torch_states.set_optimizer_state_dict(self.module, self.target, state, options=options)
            return
        self.target.load_state_dict(state)

    def _match_module(self) -> None:
        found = self.target.state_dict()
        if not isinstance(self.entry, dict):
            raise UserError("it is not the state of a module")
        bare = {_bare(name): name for name in found}
        renamed = {bare.get(_bare(name), name): value for name, value in self.entry.items()}
        entry = renamed if len(renamed) == len(self.entry) else dict(self.entry)
        if self.is_partial:
            self.left = {str(name) for name in entry if name not in found}
            entry = {name: value for name, value in entry.items() if name in found}
        if missing := [str(name) for name in found if name not in entry]:
            raise UserError(f"it has no {listed(missing, 4)}")
        if unexpected := [str(name) for name in entry if name not in found]:
            raise UserError(f"it also has {listed(unexpected, 4)}")
        self.entry = as_kind_of(self.entry, entry)
        self.likes = {(name,): value for name, value in found.items()}

    def _match_optimizer(self, modules: Sequence[Module]) -> None:
        groups = self.target.param_groups
        params = [each for group in groups for each in group["params"]]
        if not isinstance(self.entry, Mapping):
            raise UserError("it is not the state of an optimizer")
        saved = self.entry.get("param_groups") or []
        names = {each for group in saved for each in group["params"] if type(each) is str}
        if _is_flat(self.entry):
            names = {_name_in(key) for key in self.entry}
        if names:
            self._match_names(names, {id(each) for each in params}, modules)
            return
        known, had = ({*each[0]} - {"initial_lr"} if each else set() for each in (groups, saved))
        if known - had and had - known:
            raise UserError(
                f"it is the state of another optimizer, with {listed(sorted(had - known), 4)} and without "
                f"{listed(sorted(known - had), 4)}, which {type(self.target).__name__} has"
            )
        self.likes = {("state", index): each for index, each in enumerate(params)}
        # ZeroRedundancyOptimizer has none before its first save.
        with contextlib.suppress(RuntimeError):
            self.likes |= _tensors_in(self.target.state_dict())

    def _match_names(self, saved: set[str], own: set[int], modules: Sequence[Module]) -> None:
        """Of an optimizer's state by the names of parameters; `own`: the ids of this one's."""
        for module in modules:
            found = {_bare(name): each for name, each in module.named_parameters()}
            if own <= {id(each) for each in found.values()}:
                break
        else:
            raise UserError("its state is by parameter names: load its model in the same call")
        self.module = module
        names = {name: each for name, each in found.items() if id(each) in own}
        self.likes = {("state", name): each for name, each in names.items()}
        if missing := names.keys() - saved:
            raise UserError(f"it has no state of {listed(sorted(missing), 4)}")
        if self.is_partial and _is_flat(self.entry):
            self.left = saved - names.keys()
            self.entry = {key: value for key, value in self.entry.items() if _name_in(key) in names}

    def _check_tensor(self, path: Keys, value: Any) -> None:
        """Refuse a tensor that the object has in another shape, or does not tell how to place."""
        is_sharded_value = type(value) is ShardedValue
        like = like_of(path, self.likes)
        name = str(path[0]) if len(path) == 1 else shown_path(path, "")
        if not isinstance(like, Tensor):
            if is_sharded_value:
                raise UserError(
                    f"{name} is sharded, and {type(self.target).__name__}.state_dict() has no such tensor, "
                    "which would tell its place: build it before, or use full_tensor()"
                )
        elif is_sharded_value or isinstance(self.target, Module):
            if like.is_meta:
                raise UserError(
                    f"{name} is on meta, and has no memory: call its to_empty(device=…) before"
                )
            is_lazy = torch.nn.parameter.is_lazy(like)
            if not is_lazy and getattr(value, "shape", like.shape) != like.shape:
                raise UserError(
                    f"{name} was saved with shape {list(value.shape)}; it now has {list(like.shape)}"
                )


def like_of(path: Keys, likes: Mapping[Keys, Any]) -> Any:
    """The object's own tensor, or for the state of an optimizer its parameter."""
    own = likes.get(path, likes.get(path[:2]))
    return likes.get(("state", _name_in(path[0]))) if own is None and path else own


def placed(entry: Any, likes: Mapping[Keys, Any], *, owns: bool = False) -> Any:
    """The entry with tensors that are sharded, or whole, as those of the object. Not a collective.

    With `owns`, the object keeps the tensors: those on the CPU are copied out of their files.
    """

    def tensor(path: Keys, value: Any) -> Any:
        like: Any = like_of(path, likes)
        if isinstance(value, Tensor) and is_sharded(like) and like.shape == value.shape:
            value = ShardedValue(value.shape, [(value, [0] * value.ndim)])
        if type(value) is ShardedValue:
            return value.read_like(like) if isinstance(like, Tensor) else value.full_tensor()
        if not owns or not isinstance(value, Tensor):
            return value
        stays = not isinstance(like, Tensor) or like.device.type == "cpu" or not value.ndim
        return value.clone() if stays else value

    return mapped(entry, tensor)


def _tensors_in(state: Any) -> dict[Keys, Any]:
    found: dict[Keys, Any] = {}

    def keep(path: Keys, value: Any) -> None:
        if isinstance(value, Tensor):
            found[path] = value

    mapped(state, keep)
    return found


def _bare(name: Any) -> str:
    return _WRAPPERS.sub("", str(name))


def _name_in(key: Any) -> str:
    """The parameter in a key such as "state.fc.weight.exp_avg"."""
    return re.sub(r"^(state|param_groups)\.", "", str(key)).rpartition(".")[0]


def _is_flat(entry: Mapping[str, Any]) -> bool:
    return any(str(key).startswith(_FLAT) for key in entry)
