"""Copies of the ranks' files of shards on another file system.

Hosts that share no file system form a ring. The files of a host's ranks lie on this host and on the next one,
so that the loss of one host loses none. A rank sends its file to a rank there, over a process group that only
the saving threads use. `file_systems` decides which ranks these are.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from mpiddp.checkpoints.directory import HashedFile
from mpiddp.checkpoints.file_chunks import CHUNK_BYTES, bytes_of, empty_chunk
from mpiddp.checkpoints.manifest import Entry
from mpiddp.checkpoints.shards.index import file_of


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
                    part = empty_chunk(entry.bytes - start)
                    works.append(dist.irecv(part, rank, group=group))
                    parts.append((self._copies[rank], part))
            for work in works:
                if work is not None:
                    work.wait()
            for file, part in parts:
                file.write(bytes_of(part))
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
        chunk = empty_chunk(num_bytes)
        try:
            self._own.readinto(bytes_of(chunk))
        except OSError as error:
            self._read_error = error
        return chunk


def flush(path: Path) -> None:
    """fsync a file. On a file server, only the host that has written it can."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
