"""The table of faults: one row for each, in the order of a drill. docs/drill.md explains them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mpiddp.drill import injectors


@dataclass(frozen=True)
class Fault:
    """One fault, and how the run goes on after it.

    act: what a rank does to itself (`plan.Plan.act`). send: the signal from outside, with act "hold".
    harm: what happens to the newest checkpoint before the resume.
    before, after: ranks fewer than asked for, in the run that the fault hits and in its resume; with
        `of_hosts`, hosts fewer.
    """

    name: str
    act: str = "kill"
    send: Callable[[int], None] | None = None
    harm: injectors.Damage | None = None
    before: int = 0
    after: int = 0
    of_hosts: bool = False

    @property
    def changes_ranks(self) -> bool:
        return self.before != self.after

    @property
    def needs_hosts(self) -> bool:
        return self.of_hosts or self.act == "link"

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
    Fault("torn", harm=injectors.tear),
    Fault("flip", harm=injectors.flip_bit),
    Fault("fewer", after=1),
    Fault("more", before=1),
    Fault("host-fewer", after=1, of_hosts=True),
    Fault("host-more", before=1, of_hosts=True),
    Fault("link", "link"),
    Fault("hang", "hang"),
    Fault("launcher", "hold", injectors.kill),
)
NAMES = tuple(fault.name for fault in FAULTS)
