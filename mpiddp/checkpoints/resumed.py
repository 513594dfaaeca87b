"""What a script resumes from: see `mpiddp.Checkpoints.resume`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mpiddp.errors import UserError

_MAX_REASON = 300  # characters of torch's list of tensors that do not fit


@dataclass(frozen=True)
class Resumed:
    """A checkpoint that a script resumes from, see `Checkpoints.resume`. Tensors are on the CPU.

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

        Args:
            objects: by the name of their entry in `state`: modules, optimizers, or anything else with a
                `load_state_dict`.

        Raises:
            UserError: the checkpoint has no such entry, or that of another model.
        """
        for name, target in objects.items():
            if name not in self.state:
                raise UserError(
                    f"the checkpoint of step {self.step} has no {name!r}. "
                    f"It has: {', '.join(map(repr, self.state))}."
                )
            try:
                target.load_state_dict(self.state[name])
            except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
                reason = " ".join(str(error).split())[:_MAX_REASON].rstrip(".")
                raise UserError(
                    f"the checkpoint of step {self.step} does not fit: {name}: {reason}. "
                    "Build the same as before, or name another folder."
                ) from None
