"""Where the ranks save their shards: on their own file system, and once more on the next one.

Hosts that share no file system form a ring. The files of a host's ranks lie on this host and on the next one,
so that the loss of one host loses none. A rank sends its file to a rank there, over a process group that only
the saving threads use.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mpiddp.checkpoints.directory import HashedFile
from mpiddp.checkpoints.manifest import Entry
from mpiddp.checkpoints.shards.index import file_of

_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class FileSystems:
    """The writer rank of each rank's file system: [world_size]. All ranks have the same."""

    writer_of: tuple[int, ...]

    @property
    def writers(self) -> list[int]:
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


def transfer(
    folder: Path,
    send: tuple[int, str, int] | None,
    receive: Sequence[tuple[int, Entry]],
    group: Any,
) -> None:
    """Send a file of the folder to a rank, and receive files of others into it, all at once.

    Every pair of ranks has to agree on its transfer.

    Args:
        send: the rank, the file and its size in bytes.
        receive: the ranks, with the size and the hash of their files of shards.

    Raises:
        OSError: a file cannot be read or written, or arrived damaged.
        RuntimeError: a connection broke.
    """
    incoming = [(rank, entry, HashedFile(folder / file_of(rank))) for rank, entry in receive]
    outgoing = None if send is None else (folder / send[1]).open("rb")
    try:
        sizes = [entry.bytes for _, entry, _ in incoming] + [send[2] if send else 0]
        for start in range(0, max(sizes), _CHUNK_BYTES):
            works = []
            if outgoing is not None and send is not None and start < send[2]:
                chunk = _empty(send[2] - start)
                outgoing.readinto(memoryview(chunk.numpy()))  # type: ignore[arg-type]
                works.append(dist.isend(chunk, send[0], group=group))
            parts = []
            for rank, entry, file in incoming:
                if start < entry.bytes:
                    part = _empty(entry.bytes - start)
                    works.append(dist.irecv(part, rank, group=group))
                    parts.append((file, part))
            for work in works:
                if work is not None:
                    work.wait()
            for file, part in parts:
                file.write(memoryview(part.numpy()))  # type: ignore[arg-type]
    finally:
        if outgoing is not None:
            outgoing.close()
        hashes = [file.close() for _, _, file in incoming]
    for (rank, entry, _), found in zip(incoming, hashes, strict=True):
        if found != entry.sha256:
            raise OSError(errno.EIO, f"{file_of(rank)} arrived damaged: its SHA-256 differs")
        flush(folder / file_of(rank))


def flush(path: Path) -> None:
    """fsync a file. On a file server, only the host that has written it can."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _empty(num_bytes: int) -> torch.Tensor:
    return torch.empty(min(num_bytes, _CHUNK_BYTES), dtype=torch.uint8)
