"""Send files from rank to rank, in chunks that are hashed on arrival.

A resume sends files to the hosts that lack them. A save of shards sends each rank's file to the next host.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mpiddp.checkpoints.folders import Entry
from mpiddp.checkpoints.tensor_files import HashedFile
from mpiddp.files import flush

CHUNK_BYTES = 4 << 20  # each file travels in parts of this size


@dataclass(frozen=True)
class Transfer:
    """A file to send."""

    source: int  # the rank that has it
    path: Path  # on this rank; the receivers give their file the same name
    entry: Entry
    receivers: tuple[int, ...]


def send_files(transfers: Sequence[Transfer], rank: int, group: Any, into: Path) -> None:
    """Send and receive these files, all at once. Every rank passes the same list.

    A rank whose disk fails takes part until the end, because the others wait for it. The group is one of all
    ranks, for tensors on the CPU. A script may call destroy_process_group while its last save is under way:
    the group still works then, and only `dist.isend` would refuse it.
    """
    problems: list[OSError] = []

    def tried(work: Callable[..., Any], *arguments: Any) -> Any:
        """The result; None if the disk fails."""
        try:
            return work(*arguments)
        except OSError as error:
            problems.append(error)
            return None

    # A rank receives its own file if another host shares the disk of the run with it, but not this file.
    for transfer in transfers:
        if transfer.source == rank and rank in transfer.receivers:
            tried(shutil.copyfile, transfer.path, into / transfer.path.name)
    nothing = Path(os.devnull)  # takes the place of a file that cannot be opened
    # The number of each file is its tag.
    files: list[tuple[int, Transfer, Any]] = [
        (tag, transfer, tried(transfer.path.open, "rb") or nothing.open("rb"))
        if transfer.source == rank
        else (tag, transfer, tried(HashedFile, into / transfer.path.name) or HashedFile(nothing))
        for tag, transfer in enumerate(transfers)
        if transfer.source == rank or rank in transfer.receivers
    ]
    for start in range(
        0, max([transfer.entry.bytes for _, transfer, _ in files], default=0), CHUNK_BYTES
    ):
        works, parts = [], []
        for tag, transfer, file in files:
            if (left := transfer.entry.bytes - start) <= 0:
                continue
            chunk = torch.empty(min(left, CHUNK_BYTES), dtype=torch.uint8, device="cpu")
            data = memoryview(chunk.numpy())  # type: ignore[arg-type]
            if transfer.source != rank:
                works.append(group.recv([chunk], transfer.source, tag))
                parts.append((file, data))
                continue
            tried(file.readinto, data)
            works += [group.send([chunk], to, tag) for to in transfer.receivers if to != rank]
        for work in works:
            work.wait()
        for file, data in parts:
            tried(file.write, data)
    for _, transfer, file in files:
        sha256 = tried(file.close)
        if transfer.source == rank:
            continue
        if sha256 == transfer.entry.sha256:
            tried(flush, into / transfer.path.name)
        else:
            problem = f"{transfer.path.name} arrived damaged: its SHA-256 differs"
            problems.append(OSError(errno.EIO, problem))
    if problems:
        raise problems[0]


def receivers_of(writer_of: Sequence[int]) -> list[int]:
    """The rank that keeps a copy of each rank's shards: [world_size]. `writer_of`: see `Run`.

    Hosts without a shared file system form a ring, in which each also keeps the shards of the host before
    it. So the loss of one host loses nothing. A single host is a ring of itself.
    """
    hosts = [
        [rank for rank, other in enumerate(writer_of) if other == writer]
        for writer in sorted(set(writer_of))
    ]
    receivers = {
        rank: there[index % len(there)]
        for here, there in zip(hosts, [*hosts[1:], hosts[0]], strict=True)
        for index, rank in enumerate(here)
    }
    return [receivers[rank] for rank in range(len(writer_of))]
