"""End a training whose ranks no longer hold the same bits, before they save."""

from __future__ import annotations

from mpiddp.errors import JobFailed
from mpiddp.runtime.coordinator import Coordinator
from mpiddp.runtime.divergence import find_divergence
from mpiddp.train.engine import TrainState
from mpiddp.train.saver import Saver


def refuse_divergence(state: TrainState, step: int, saver: Saver, coordinator: Coordinator) -> None:
    """Exit on all ranks unless all hold the same bits. A collective: every rank must call it.

    This check precedes every save, so a restart resumes from bits in which all ranks agreed.

    Raises:
        SystemExit: with code 1. Rank 0 has printed the error, and the save in flight is complete.
    """
    if sentence := find_divergence(state.model, state.optimizer, step=step):
        saver.finish()
        with coordinator.all_or_none():
            raise JobFailed(
                f"{sentence} This state is not saved; a restart resumes from the newest checkpoint."
            )
