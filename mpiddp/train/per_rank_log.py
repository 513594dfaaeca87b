"""--per-rank-log: the lines of the multi-node guides' script, on stdout of every rank.

    Local Rank: 1, Epoch: 0, Training ...
    num_steps_per_gpu: 20, avg_step_time: 0.1234
    Average epoch time: 2.468

Times are this rank's own, in seconds, without evaluations and saves. As in the guides, the first epoch is
left out of the average of the epochs, unless it is the only one.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from mpiddp.runtime.log import log_of_every_rank


class PerRankLog:
    """Prints the lines of one rank, or nothing if it is not wanted."""

    def __init__(self, local_rank: int | None, *, is_wanted: bool) -> None:
        self._local_rank = local_rank
        self._log = log_of_every_rank() if is_wanted else None
        self._epoch_times_s: list[float] = []

    def epoch_begins(self, epoch: int) -> None:
        if self._log is not None:
            self._log.info(f"Local Rank: {self._local_rank}, Epoch: {epoch}, Training ...")

    def epoch_ends(self, step_times_s: Sequence[float]) -> None:
        if self._log is not None and step_times_s:
            self._epoch_times_s.append(sum(step_times_s))
            self._log.info(
                f"num_steps_per_gpu: {len(step_times_s)}, avg_step_time: {mean(step_times_s):.4f}"
            )

    def training_ends(self) -> None:
        counted = self._epoch_times_s[1:] or self._epoch_times_s
        if self._log is not None and counted:
            self._log.info(f"Average epoch time: {mean(counted):.4f}")
