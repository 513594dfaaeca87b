"""The hosts of a run: which of them share a file system, and how files travel from one to another.

Shared file systems are detected: one rank of each host creates a file in the run's folder, and looks for
the files of the others. Hosts that share none form a ring, in which each also keeps the shards of the host
before it. So the loss of one host loses nothing.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpiddp.checkpoints.directory import Entry, HashedFile, flush
from mpiddp.checkpoints.ranks import Ranks
from mpiddp.checkpoints.run_dir import RunDir, writing
from mpiddp.checkpoints.shard_index import file_of

CHUNK_BYTES = 16 << 20  # so that no rank holds a whole file in memory


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


def find_file_systems(run: RunDir, ranks: Ranks) -> FileSystems:
    """The file systems on which the run's folder lies. All ranks must call this.

    Raises:
        UserError: a host cannot write there.
        JobFailed: a host cannot write or read there, because its disk has failed.
    """
    own, out = "", run.path
    seen: list[int] = []
    if ranks.is_first_of_host:
        own = f".seen-by-rank-{ranks.rank}-{secrets.token_hex(8)}"
    try:
        with ranks.together(), writing(run):
            if own:
                (out / own).touch()
        marks = ranks.gather(own)
        with ranks.together(), writing(run):
            if own:
                seen = [rank for rank, mark in enumerate(marks) if mark and (out / mark).exists()]
        # The lowest rank that a host sees writes for all hosts that see the same file system.
        found = (ranks.coordinator.world.node_rank, seen[0] if seen else None)
        firsts = ranks.gather(found)
    finally:
        if own:
            with contextlib.suppress(OSError):
                (out / own).unlink()
    writer_of_node = {node: writer for node, writer in firsts if writer is not None}
    return FileSystems(tuple(writer_of_node[node] for node, _ in firsts))


# From one host to all


def chunks(
    source: int, folder: Path, files: Sequence[tuple[str, int]], group: dist.ProcessGroup
) -> Iterator[tuple[str, memoryview]]:
    """The pieces of each file, on every rank. Each step of this iterator is a broadcast.

    Args:
        source: the rank that has the files, in its `folder`.
        files: their names and sizes in bytes, the same on every rank.
    """
    for name, size in files:
        with contextlib.ExitStack() as stack:
            is_source = dist.get_rank() == source
            file = stack.enter_context((folder / name).open("rb")) if is_source and size else None
            for start in range(0, size, CHUNK_BYTES):
                chunk = _empty_chunk(size - start)
                if file is not None:
                    file.readinto(_bytes_of(chunk))
                dist.broadcast(chunk, source, group=group)
                yield name, _bytes_of(chunk)


def _empty_chunk(num_bytes: int) -> Tensor:
    """Memory for the next chunk of a file of which `num_bytes` are left: uint8 [at most CHUNK_BYTES]."""
    return torch.empty(min(num_bytes, CHUNK_BYTES), dtype=torch.uint8)


def _bytes_of(chunk: Tensor) -> memoryview:
    return memoryview(chunk.numpy())  # type: ignore[arg-type]


# From each host to the next


class Transfer:
    """The file that a rank sends, and the copies that it receives, in one folder.

    All files are open before any rank sends: the peers of a rank that cannot open one would wait for it.
    """

    def __init__(self, folder: Path, rank: int, senders: Sequence[int]) -> None:
        """
        Raises:
            OSError: a file cannot be opened.
        """
        self._folder = folder
        self._copies: dict[int, HashedFile] = {}
        self._read_error: OSError | None = None
        self._own = (folder / file_of(rank)).open("rb")
        try:
            for sender in senders:
                self._copies[sender] = HashedFile(folder / file_of(sender))
        except OSError:
            self.close()
            raise

    def run(
        self, receiver: int | None, own_bytes: int, incoming: Mapping[int, Entry], group: Any
    ) -> None:
        """Send and receive, all at once. Every pair of ranks has to agree on its transfer.

        Args:
            receiver: None to send nothing.
            own_bytes: the size of this rank's file.
            incoming: the sizes and the hashes of the files to receive, by rank.

        Raises:
            OSError: a file cannot be read or written, or arrived damaged.
            RuntimeError: a connection broke, or a rank was silent.
        """
        to_send = own_bytes if receiver is not None else 0
        sizes = [to_send, *(entry.bytes for entry in incoming.values())]
        for start in range(0, max(sizes), CHUNK_BYTES):
            works, parts = [], []
            if start < to_send:
                chunk = self._read(to_send - start)
                works.append(dist.isend(chunk, receiver, group=group))
            for rank, entry in incoming.items():
                if start < entry.bytes:
                    part = _empty_chunk(entry.bytes - start)
                    works.append(dist.irecv(part, rank, group=group))
                    parts.append((self._copies[rank], part))
            for work in works:
                if work is not None:
                    work.wait()
            for file, part in parts:
                file.write(_bytes_of(part))
        for rank, entry in incoming.items():
            if self._copies[rank].close() != entry.sha256:
                raise OSError(errno.EIO, f"{file_of(rank)} arrived damaged: its SHA-256 differs")
            flush(self._folder / file_of(rank))
        if self._read_error is not None:
            raise self._read_error

    def close(self) -> None:
        self._own.close()
        for file in self._copies.values():
            with contextlib.suppress(OSError):
                file.close()

    def _read(self, num_bytes: int) -> Tensor:
        """The next chunk of this rank's file. After an error the receiver finds another SHA-256."""
        chunk = _empty_chunk(num_bytes)
        try:
            self._own.readinto(_bytes_of(chunk))
        except OSError as error:
            self._read_error = error
        return chunk
