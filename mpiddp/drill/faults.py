"""The table of faults: one row for each, in the order of a drill. docs/drill.md explains them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mpiddp.drill import injectors


@dataclass(frozen=True)
class Fault:
    """One fault, and how the run goes on after it.

    act: what a rank does to itself (`plan.Plan.act`). send: the signal from outside, with act "hold".
    damage: what happens to the newest checkpoint before the resume.
    fewer_ranks_first, fewer_ranks_at_resume: than asked for.
    """

    name: str
    act: str = "kill"
    send: Callable[[int], None] | None = None
    damage: injectors.Damage | None = None
    fewer_ranks_first: int = 0
    fewer_ranks_at_resume: int = 0

    @property
    def changes_ranks(self) -> bool:
        return self.fewer_ranks_first != self.fewer_ranks_at_resume

    @property
    def is_of_save(self) -> bool:
        return self.act.endswith(" in save")

    @property
    def is_request(self) -> bool:
        """Whether a run may save before it ends."""
        return self.name in ("sigterm", "ctrl-c", "timeout")


FAULTS = (
    Fault("kill"),
    Fault("kill-in-save", "kill in save"),
    Fault("sigterm", "hold", injectors.to_all),
    Fault("ctrl-c", "hold", injectors.ctrl_c),
    Fault("timeout", "hold", injectors.time_limit),
    Fault("full", "full in save"),
    Fault("torn", damage=injectors.tear),
    Fault("flip", damage=injectors.flip_bit),
    Fault("fewer", fewer_ranks_at_resume=1),
    Fault("more", fewer_ranks_first=1),
    Fault("hang", "hang"),
    Fault("launcher", "hold", injectors.kill_launcher),
)
NAMES = tuple(fault.name for fault in FAULTS)
