"""A checkpoint as a script has it: the state, whose sharded tensors are still in their files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.nn import Module

from mpiddp.checkpoints.fit import Fit
from mpiddp.checkpoints.folders import About
from mpiddp.errors import JobFailed, UserError

_MAX_REASON = 300  # characters of torch's list of tensors that do not fit


@dataclass(frozen=True)
class Resumed:
    """A checkpoint that a script resumes from, see `Checkpoints.resume`, or reads, see `load`.

    Tensors are on the CPU, and mapped from their files: they take memory of their own only once they change.
    In the place of a sharded tensor there is a value with its `shape`, `dtype` and `full_tensor()`. The files
    stay as long as a tensor of them lives. At the first save of a resumed run, the entries that `load_into` has
    loaded leave `state`, so that the files may go.

    Attributes:
        about: its facts, such as `about.step` and `about.config`.
        state: what all ranks have in common, as it was given to `Checkpoints.save`.
        per_rank: the state of this rank alone; {} if the job that saved it had no such rank.
    """

    about: About
    state: dict[str, Any]
    per_rank: dict[str, Any] = field(default_factory=dict)
    # The state that each rank has saved for itself.
    _ranks: list[Any] = field(default_factory=list, repr=False)
    _loaded: set[str] = field(default_factory=set, repr=False)  # entries that load_into has loaded
    # By entry, the tensors of other stages, which this rank has not loaded.
    _unloaded: dict[str, set[str]] = field(default_factory=dict, repr=False)

    @property
    def step(self) -> int:
        """The step after which it was saved."""
        return self.about.step

    @property
    def world_size(self) -> int:
        """Number of ranks of the job that saved it."""
        return max(len(self._ranks), 1)

    def load_into(self, *, strict: bool = True, **objects: Any) -> None:
        """Call `load_state_dict` of each object with the entry of the same name.

            saved.load_into(model=model, optimizer=optimizer)

        All of them are compared with their entries before the first one changes. A tensor that is sharded in
        the object is loaded in parts, whether it was sharded when it was saved or not, and at any number of
        ranks. A module of one pipeline stage takes its own tensors; the first save refuses if no rank has
        taken one. A module's names match with or without the prefixes of DDP and torch.compile. An
        optimizer's state may be by parameter names, as torch's `get_optimizer_state_dict` returns it, if its
        module is among the objects.

        Args:
            strict: False loads into modules what fits, such as adapters, or all but a new head, and logs
                what it leaves out: the names that only one side has, and tensors of another shape.
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
        modules = [target for target in objects.values() if isinstance(target, Module)]
        partial = frozenset(map(tuple, self.about.partial))
        name, fits = "", list[Fit]()
        try:
            for name, target in objects.items():
                entry = self.state[name]
                fits += Fit((name,), entry, target, modules, strict, partial).parts()
            types = {
                id(parameter): fit.entry[name].dtype
                for fit in fits
                if isinstance(fit.target, Module)
                for name, parameter in fit.target.named_parameters()
                if name in fit.entry
            }
            for fit in fits:
                name = fit.name
                fit.load(types)
                self._unloaded[name] = self._unloaded.get(name, fit.unloaded) & fit.unloaded
            self._loaded.update(objects)
        except JobFailed:
            raise
        except Exception as error:  # whatever a load_state_dict raises
            reason = " ".join(str(error).split())[:_MAX_REASON].rstrip(".")
            fix = "build the same as before, or name another folder"
            raise UserError(f"{where} does not fit: {name}: {reason}.", fix=fix) from None
