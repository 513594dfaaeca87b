"""Send files from rank to rank, in chunks, hashed on arrival; and which rank keeps a copy of whose shards.

A resume sends files to the hosts that lack them. A save of shards sends each rank's file to the next host.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpiddp.checkpoints.folder import Entry
from mpiddp.checkpoints.state import HashedFile
from mpiddp.paths import flush

CHUNK_BYTES = 4 << 20  # of each file that is under way


@dataclass(frozen=True)
class Transfer:
    """A file to send."""

    source: int  # the rank that has it
    path: Path  # there; the receivers use its name
    entry: Entry
    receivers: tuple[int, ...]


def send_files(transfers: Sequence[Transfer], rank: int, group: Any, into: Path) -> None:
    """Send and receive these files, all at once. Every rank passes the same list.

    A rank whose disk fails takes part until the end, because the others wait for it. A script may call
    destroy_process_group while its last save is under way: the group itself still works then, and
    `dist.isend` would refuse it. The group is one of all ranks, for tensors on the CPU.
    """
    problems: list[OSError] = []

    def attempt(work: Callable[..., Any], *arguments: Any) -> Any:
        """The result; None if the disk fails."""
        try:
            return work(*arguments)
        except OSError as error:
            problems.append(error)
            return None

    # The number of each file is its tag. A file that cannot be opened is None.
    outgoing = [
        (tag, each, attempt(each.path.open, "rb"))
        for tag, each in enumerate(transfers)
        if each.source == rank and each.receivers
    ]
    incoming = [
        (tag, each, attempt(HashedFile, into / each.path.name))
        for tag, each in enumerate(transfers)
        if rank in each.receivers
    ]
    sizes = [each.entry.bytes for _, each, _ in (*outgoing, *incoming)]
    for start in range(0, max(sizes, default=0), CHUNK_BYTES):
        works, parts = [], []
        for tag, each, source in outgoing:
            if (left := each.entry.bytes - start) > 0:
                chunk = _empty_chunk(left)
                if source is not None:
                    attempt(source.readinto, _bytes_of(chunk))
                works += [group.send([chunk], receiver, tag) for receiver in each.receivers]
        for tag, each, target in incoming:
            if (left := each.entry.bytes - start) > 0:
                chunk = _empty_chunk(left)
                works.append(group.recv([chunk], each.source, tag))
                parts.append((target, chunk))
        for work in works:
            work.wait()
        for target, chunk in parts:
            if target is not None:
                target.write(_bytes_of(chunk))
    for _, _, source in outgoing:
        if source is not None:
            source.close()
    for _, each, target in incoming:
        if target is not None and attempt(target.close) != each.entry.sha256:
            problem = f"{each.path.name} arrived damaged: its SHA-256 differs"
            problems.append(OSError(errno.EIO, problem))
        elif target is not None:
            attempt(flush, into / each.path.name)
    if problems:
        raise problems[0]


def _empty_chunk(num_bytes: int) -> Tensor:
    """Memory for the next chunk of a file of which `num_bytes` are left: uint8 [at most CHUNK_BYTES]."""
    return torch.empty(min(num_bytes, CHUNK_BYTES), dtype=torch.uint8, device="cpu")


def _bytes_of(chunk: Tensor) -> memoryview:
    return memoryview(chunk.numpy())  # type: ignore[arg-type]


# Hosts without a shared file system form a ring, in which each also keeps the shards of the host before it.
# So the loss of one host loses nothing. `writer_of`: the writer of each rank's file system, [world_size].


def receiver_of(rank: int, writer_of: Sequence[int]) -> int | None:
    """The rank that keeps a copy of this rank's file; None if there is no other file system."""
    writers = sorted(set(writer_of))
    if len(writers) == 1:
        return None
    index = writers.index(writer_of[rank])
    there = _ranks_at(writers[(index + 1) % len(writers)], writer_of)
    return there[_ranks_at(writers[index], writer_of).index(rank) % len(there)]


def shards_at(rank: int, writer_of: Sequence[int]) -> list[int]:
    """The ranks whose shards lie on this rank's file system: its own, and those of copies."""
    here = _ranks_at(writer_of[rank], writer_of)
    kept = [each for each in range(len(writer_of)) if receiver_of(each, writer_of) in here]
    return sorted({*here, *kept})


def _ranks_at(writer: int, writer_of: Sequence[int]) -> list[int]:
    return [rank for rank, its in enumerate(writer_of) if its == writer]
