"""Compare an entry of a checkpoint with the object that loads it, before any object changes; then load it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from mpiddp.checkpoints.state import (
    LISTS,
    Keys,
    ShardedValue,
    as_kind_of,
    is_sharded,
    leaves,
    mapped,
    shown_path,
)
from mpiddp.errors import UserError
from mpiddp.runtime.rank_log import log
from mpiddp.text import listed

# DDP, torch.compile and activation checkpointing add these to the names of parameters.
_WRAPPERS = re.compile(r"^((_orig_mod|module)\.)+|\b_(orig_mod|checkpoint_wrapped_module)\.")
_FLAT = "param_groups."  # begins the keys of a flattened optimizer's state
_MAX_NAMES = 4  # in a sentence


@dataclass
class Fit:
    """An object, and the entry that it loads.

    Attributes:
        path: of the entry in the state.
        entry: the part of the entry that the object loads, by the object's own names.
        modules: all modules that are loaded together.
        partial: the paths in the state that only some ranks had.
        likes: by the path of a tensor in the entry, the object's tensor that has the same place.
        module: the module of an optimizer whose state is by parameter names.
        unloaded: the tensors of other stages, which this object does not load.
    """

    path: Keys
    entry: Any
    target: Any
    modules: Sequence[Module]
    strict: bool
    partial: frozenset[Keys]
    likes: dict[Keys, Any] = field(default_factory=dict)
    module: Module | None = None
    unloaded: set[str] = field(default_factory=set)

    def parts(self) -> Iterator[Fit]:
        """This fit, or that of each object in a dict. Raises UserError if an entry does not fit."""
        target = self.target
        if type(target) is dict:
            for key, part in target.items():
                if not isinstance(self.entry, Mapping) or key not in self.entry:
                    raise UserError(f"it has no {key!r}")
                path, entry = (*self.path, key), self.entry[key]
                yield from replace(self, path=path, entry=entry, target=part).parts()
            return
        if isinstance(target, Module):
            self._match_module()
        elif isinstance(target, Optimizer):
            self._match_optimizer()
        elif callable(getattr(target, "state_dict", None)):
            self.likes = _tensors_in(target.state_dict())
        if not isinstance(target, Module):
            for path, value in leaves(self.entry):
                if type(value) is ShardedValue:
                    self._check_place(path)
        yield self

    @property
    def name(self) -> str:
        return shown_path(self.path[1:], self.path[0])

    def _is_partial(self, key: Any) -> bool:
        """Whether only some ranks had the item of the entry with this key."""
        path = (*self.path, key)
        return any(path[:end] in self.partial for end in range(1, len(path) + 1))

    def load(self, types: Mapping[int, torch.dtype]) -> None:
        """Load the entry. Not a collective, unless the object's own `load_state_dict` is one.

        `types`: by the id of a parameter, the type with which it was saved.
        """
        if isinstance(self.target, Module):
            state = placed(self.entry, self.likes)
            self.target.load_state_dict(state, strict=self.strict)
            return
        is_optimizer = isinstance(self.target, Optimizer)
        state = placed(self.entry, self.likes, owns=True, is_optimizer=is_optimizer)
        if self.module is not None:
            from torch.distributed.checkpoint import state_dict as torch_states

            options = torch_states.StateDictOptions(
                flatten_optimizer_state_dict=_is_flat(self.entry)
            )
            torch_states.set_optimizer_state_dict(self.module, self.target, state, options=options)
        else:
            self.target.load_state_dict(state)
        if is_optimizer:
            self._restore_types(state, types)

    def _restore_types(self, placed_state: Any, types: Mapping[int, torch.dtype]) -> None:
        """Give each state of an optimizer the type with which it was saved.

        `Optimizer.load_state_dict` casts it to the type of its parameter, which loses bits of fp32 moments
        and of quantized codes. That is right only if the script has changed the type of the parameter.
        """
        saved = placed_state.get("state", {})
        if _is_flat(placed_state):
            saved = {}
            for key, value in placed_state.items():
                saved.setdefault(_name_in(key), {})[key.rpartition(".")[2]] = value
        for path, parameter in self.likes.items():
            is_of_parameter = len(path) == 2 and path[0] == "state"
            if not is_of_parameter or types.get(id(parameter), parameter.dtype) != parameter.dtype:
                continue
            state = getattr(self.target, "state", {}).get(parameter)
            if state is not None and path[1] in saved:
                _restore(state, saved[path[1]])

    def _match_module(self) -> None:
        tensors = self.target.state_dict()
        if not isinstance(self.entry, dict):
            raise UserError("it is not the state of a module")
        bare = {bare_name(name): name for name in tensors}
        renamed = {bare.get(bare_name(name), name): value for name, value in self.entry.items()}
        entry = renamed if len(renamed) == len(self.entry) else dict(self.entry)
        # The tensors of other stages have kept their names.
        rest = {n for n in entry if n not in tensors and self._is_partial(n)}
        self.unloaded = set(map(str, rest))
        entry = {name: value for name, value in entry.items() if name not in rest}
        if not self.strict:
            entry = self._leave_out(tensors, entry)
        # If a module loads its tensors by code of its own, this code decides what fits.
        loads_itself = tuple(_prefixes_of_own_loads(self.target))
        for problem, names, others in (("has no", tensors, entry), ("also has", entry, tensors)):
            missing = [str(name) for name in names if name not in others]
            missing = [name for name in missing if not name.startswith(loads_itself)]
            if missing and self.strict:
                raise UserError(f"it {problem} {listed(missing, _MAX_NAMES)}")
        self.entry = as_kind_of(self.entry, entry)
        self.likes = {(name,): value for name, value in tensors.items()}
        for name, value in tensors.items():
            if not isinstance(value, Tensor) or name.startswith(loads_itself):
                continue
            _require_memory(name, value)
            is_lazy = torch.nn.parameter.is_lazy(value)  # it has no shape yet
            if not is_lazy and getattr(entry.get(name), "shape", value.shape) != value.shape:
                before, now = list(entry[name].shape), list(value.shape)
                raise UserError(f"{name} was saved with shape {before}; it now has {now}")

    def _leave_out(self, tensors: Mapping[str, Any], entry: dict[Any, Any]) -> dict[Any, Any]:
        """The part of the entry that the module has in the same shape. Logs the rest."""
        fits = {
            name: value
            for name, value in entry.items()
            if name in tensors
            and getattr(value, "shape", None) == getattr(tensors[name], "shape", None)
        }
        rest = sorted({*tensors, *entry} - fits.keys())
        if not fits:
            raise UserError("it has none of its tensors")
        if rest:
            log.info(f"{self.name}: not loaded: {listed(rest, _MAX_NAMES)}")
        return fits

    def _match_optimizer(self) -> None:
        groups = self.target.param_groups
        params = [parameter for group in groups for parameter in group["params"]]
        if not isinstance(self.entry, Mapping):
            raise UserError("it is not the state of an optimizer")
        saved = self.entry.get("param_groups") or []
        names = {name for group in saved for name in group["params"] if type(name) is str}
        if _is_flat(self.entry):
            names = {_name_in(key) for key in self.entry}
        if names:
            self._match_names(names, {id(parameter) for parameter in params})
            return
        now, before = ({*rows[0]} - {"initial_lr"} if rows else set() for rows in (groups, saved))
        if now - before and before - now:
            raise UserError(
                f"it is the state of another optimizer, with {listed(sorted(before - now), _MAX_NAMES)} and "
                f"without {listed(sorted(now - before), _MAX_NAMES)}, which {type(self.target).__name__} has"
            )
        self.likes = {("state", index): parameter for index, parameter in enumerate(params)}
        # ZeroRedundancyOptimizer raises before it has gathered its state for a first save.
        with contextlib.suppress(RuntimeError):
            self.likes |= _tensors_in(self.target.state_dict())

    def _match_names(self, saved: set[str], trained: set[int]) -> None:
        """Find the module whose parameters have these names. `trained`: the ids of the optimizer's."""
        for module in self.modules:
            parameters = {
                bare_name(name): parameter for name, parameter in module.named_parameters()
            }
            if trained <= {id(parameter) for parameter in parameters.values()}:
                break
        else:
            raise UserError("its state is by parameter names: load its model in the same call")
        self.module = module
        names = {
            name: parameter for name, parameter in parameters.items() if id(parameter) in trained
        }
        self.likes = {("state", name): parameter for name, parameter in names.items()}
        if missing := names.keys() - saved:
            raise UserError(f"it has no state of {listed(sorted(missing), _MAX_NAMES)}")
        if _is_flat(self.entry):
            partial = (key for key in self.entry if self._is_partial(key))
            self.unloaded = {_name_in(key) for key in partial}.difference(names)
            rows = self.entry.items()
            self.entry = {key: value for key, value in rows if _name_in(key) not in self.unloaded}

    def _check_place(self, path: Keys) -> None:
        """Refuse a sharded tensor if the object has no tensor that tells how to place it."""
        like = like_of(path, self.likes)
        name = str(path[0]) if len(path) == 1 else shown_path(path, "")
        if not isinstance(like, Tensor):
            raise UserError(
                f"{name} is sharded, and {type(self.target).__name__}.state_dict() has no such tensor, "
                "which would tell its place: build it before, or use full_tensor()"
            )
        _require_memory(name, like)


def _require_memory(name: str, tensor: Tensor) -> None:
    if tensor.is_meta:
        raise UserError(f"{name} is on meta, and has no memory: call its to_empty(device=…) before")


def _prefixes_of_own_loads(module: Module) -> Iterator[str]:
    """The beginnings of the names that a module loads by code of its own, which may accept another shape."""
    for prefix, part in module.named_modules():
        start = f"{prefix}." if prefix else ""
        code = type(part)._load_from_state_dict.__module__
        hooks = getattr(part, "_load_state_dict_pre_hooks", {}).values()
        codes = (getattr(hook, "hook", hook) for hook in hooks)  # torch wraps the hook of a module
        is_own = not code.startswith(("torch.nn.modules", "torch.nn.parallel"))
        if is_own or any(
            not str(getattr(code, "__module__", "torch")).startswith("torch") for code in codes
        ):
            yield start
        if type(part).set_extra_state is not Module.set_extra_state:
            yield f"{start}_extra_state"


def _restore(loaded: Any, saved: Any) -> Any:
    """The loaded state, with the types that its tensors had when they were saved."""
    if isinstance(saved, Mapping) and isinstance(loaded, dict):
        for key in saved.keys() & loaded.keys():
            loaded[key] = _restore(loaded[key], saved[key])
    elif type(saved) in LISTS and type(loaded) is type(saved) and len(loaded) == len(saved):
        return type(saved)(map(_restore, loaded, saved))
    elif isinstance(loaded, Tensor) and getattr(saved, "dtype", loaded.dtype) != loaded.dtype:
        return saved.to(loaded.device)
    return loaded


def like_of(path: Keys, likes: Mapping[Keys, Any]) -> Any:
    """The object's own tensor, or for the state of an optimizer its parameter."""
    like = likes.get(path, likes.get(path[:2]))
    return likes.get(("state", _name_in(path[0]))) if like is None and path else like


def placed(
    entry: Any, likes: Mapping[Keys, Any], *, owns: bool = False, is_optimizer: bool = False
) -> Any:
    """The entry with tensors that are sharded, or whole, as those of the object are. Not a collective.

    With `owns`, the object keeps the tensors, so those on the CPU are copied out of their files. The state of
    an optimizer gets the layout of its parameter, because fused kernels read both in the order of memory.
    """
    was_sharded = any(type(value) is ShardedValue for _, value in leaves(entry))

    def place(path: Keys, value: Any) -> Any:
        like: Any = like_of(path, likes)
        if isinstance(value, Tensor) and is_sharded(like):
            is_alike = like.shape == value.shape
            if is_alike or (is_optimizer and value.ndim and not was_sharded):
                value = ShardedValue(value.shape, [(value, [0] * value.ndim)])
        if type(value) is ShardedValue:
            return value.read_like(like) if isinstance(like, Tensor) else value.full_tensor()
        if not owns or not isinstance(value, Tensor):
            return value
        if is_optimizer and isinstance(like, Tensor) and value.ndim and like.shape == value.shape:
            target = torch.empty_like(like, dtype=value.dtype, requires_grad=False)
            return target.copy_(value)
        stays = not isinstance(like, Tensor) or like.device.type == "cpu" or not value.ndim
        return value.clone() if stays else value

    return mapped(entry, place)


def _tensors_in(state: Any) -> dict[Keys, Any]:
    return {path: value for path, value in leaves(state) if isinstance(value, Tensor)}


def bare_name(name: Any) -> str:
    """The name of a tensor without the prefixes of wrappers."""
    return _WRAPPERS.sub("", str(name))


def _name_in(key: Any) -> str:
    """The parameter in a key such as "state.fc.weight.exp_avg"."""
    return re.sub(r"^(state|param_groups)\.", "", str(key)).rpartition(".")[0]


def _is_flat(entry: Mapping[str, Any]) -> bool:
    return any(str(key).startswith(_FLAT) for key in entry)
