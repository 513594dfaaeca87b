"""Which ranks share a file system, and which rank writes on each.

Shared file systems are detected: one rank of each host creates a file in the run's folder, and looks for
the files of the others.
"""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass

from mpiddp.checkpoints.agreement import raised_by_all
from mpiddp.checkpoints.run_dir import RunDir, writing
from mpiddp.runtime.job.coordinator import Coordinator


@dataclass(frozen=True)
class FileSystems:
    """The writer rank of each rank's file system: [world_size]. All ranks have the same."""

    writer_of: tuple[int, ...]

    @property
    def writers(self) -> list[int]:
        """One rank for each file system, rank 0 first."""
        return sorted(set(self.writer_of))

    def receiver_of(self, rank: int) -> int | None:
        """The rank that keeps a copy of this rank's file; None if there is no other file system."""
        writers = self.writers
        if len(writers) == 1:
            return None
        index = writers.index(self.writer_of[rank])
        there = self._ranks_at(writers[(index + 1) % len(writers)])
        return there[self._ranks_at(writers[index]).index(rank) % len(there)]

    def senders_to(self, rank: int) -> list[int]:
        """The ranks of whose files this rank keeps a copy."""
        return [each for each in range(len(self.writer_of)) if self.receiver_of(each) == rank]

    def _ranks_at(self, writer: int) -> list[int]:
        return [rank for rank, its in enumerate(self.writer_of) if its == writer]


def find_file_systems(coordinator: Coordinator, run: RunDir, *, timeout_s: float) -> FileSystems:
    """The file systems on which the run's folder lies. All ranks must call this.

    Raises:
        UserError: a host cannot write there.
        JobFailed: a host cannot write or read there, because its disk has failed.
    """
    own, out = "", run.path
    seen: list[int] = []
    if coordinator.world.local_rank == 0:
        own = f".seen-by-rank-{coordinator.world.rank}-{secrets.token_hex(8)}"
    try:
        with raised_by_all(coordinator, timeout_s=timeout_s), writing(run):
            if own:
                (out / own).touch()
        marks = coordinator.all_gather_json(own, timeout_s=timeout_s)
        with raised_by_all(coordinator, timeout_s=timeout_s), writing(run):
            if own:
                seen = [rank for rank, mark in enumerate(marks) if mark and (out / mark).exists()]
        # The lowest rank that a host sees writes for all hosts that see the same file system.
        found = (coordinator.world.node_rank, seen[0] if seen else None)
        firsts = coordinator.all_gather_json(found, timeout_s=timeout_s)
    finally:
        if own:
            with contextlib.suppress(OSError):
                (out / own).unlink()
    writer_of_node = {node: writer for node, writer in firsts if writer is not None}
    return FileSystems(tuple(writer_of_node[node] for node, _ in firsts))
