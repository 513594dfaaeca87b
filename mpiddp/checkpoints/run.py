"""The folder of a run, open and owned: where its ranks find a checkpoint, and how its files reach each host.

    run = open_run(folder, ranks)
    if found := run.newest():
        files = run.bring(found)        # by name, on this host

Files travel, objects do not: after `bring`, every rank reads the checkpoint from its own host.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mpiddp.checkpoints import directory, find
from mpiddp.checkpoints.directory import BrokenCheckpoint
from mpiddp.checkpoints.find import Found
from mpiddp.checkpoints.owner import RunOwner, own
from mpiddp.checkpoints.ranks import FileSystems, Ranks, find_file_systems
from mpiddp.checkpoints.run_dir import RunDir, replacing, writing
from mpiddp.checkpoints.state import HashedFile
from mpiddp.errors import JobFailed
from mpiddp.paths import cause_of
from mpiddp.protocol.variables import RUN_ID
from mpiddp.runtime.log import log
from mpiddp.text import counted

CHUNK_BYTES = 16 << 20  # so that no rank holds a whole file in memory


@dataclass(frozen=True)
class Run:
    """The open folder of a run, on one rank."""

    dir: RunDir
    ranks: Ranks
    file_systems: FileSystems
    owner: RunOwner | None  # on the ranks that write into the folder: one of each file system

    @property
    def is_writer(self) -> bool:
        return self.ranks.rank in self.file_systems.writers

    def check_owner(self) -> None:
        """Raise JobFailed if another run has taken the folder."""
        if self.owner is not None:
            self.owner.check()

    def newest(self, path: Path | None = None) -> Found | None:
        """The newest checkpoint, or the one at `path`, on any host. All ranks must call this; see `find`."""
        return find.newest(self.dir, self.ranks, path)

    def bring(self, found: Found) -> dict[str, Path]:
        """Bring the checkpoint's files to the hosts that lack them. A collective: every rank must call it.

        A whole checkpoint of this run becomes one of each host's, with its records. Others, and shards, go
        into a hidden folder that the next save removes.

        Returns:
            Where this host has each file, by its name.

        Raises:
            JobFailed: a host cannot read or store a file.
        """
        ranks, root = self.ranks, self.dir.checkpoints
        own = found.host_of(ranks.coordinator.world.node_rank)
        here = {
            name: Path(own.folder) / name for name in found.files if own and name not in own.lacks
        }
        lacking = found.lacking()
        if not lacking:
            return here
        assert ranks.group is not None, "another host has them"
        keeps = self._keeps(found)
        if found.is_own:
            self._send_records(found, keeps, ranks.group)
        copies = found.is_own and not found.is_sharded
        if copies:
            received = root / found.folder.name
        else:
            received = directory.hidden(root, f"received-{found.save[:16]}")
            what = f"{counted(len(lacking), 'file')}{' of shards' if found.is_sharded else ''}"
            log.info(f"sending {what} to the hosts that lack them")
        sources = [next(host for host in found.hosts if each not in host.lacks) for each in lacking]
        files = [
            (host.rank, Path(host.folder) / name, found.files[name].bytes)
            for name, host in zip(lacking, sources, strict=True)
        ]
        pieces = _sent(files, ranks.group)
        problem = ""
        try:
            if keeps and copies:
                root.mkdir(parents=True, exist_ok=True)
                directory.write_folder(received, lambda new: _receive(new, pieces, found))
            elif keeps:
                received.mkdir(parents=True, exist_ok=True)
                _receive(received, pieces, found)
        except (OSError, BrokenCheckpoint) as error:
            reason = getattr(error, "strerror", None) or str(error)
            problem = f"{received}: cannot keep the files of other hosts: {reason}."
        problem = _finish(pieces, f"{found.folder}: cannot send its files") or problem
        with ranks.together():
            if problem:
                raise JobFailed(problem)
        return {name: here.get(name, received / name) for name in found.files}

    def _keeps(self, found: Found) -> bool:
        """Whether this rank stores the files for hosts that lack some."""
        has_all = found.has_all(self.ranks.coordinator.world.node_rank)
        lacks = self.ranks.gather(not has_all)
        writer_of = self.file_systems.writer_of
        return any(
            lacks[rank] and writer == self.ranks.rank for rank, writer in enumerate(writer_of)
        )

    def _send_records(self, found: Found, keeps: bool, group: dist.ProcessGroup) -> None:
        """Copy the records of the run to the hosts that lack them. One that cannot keep them is warned."""
        ranks, holder = self.ranks, found.hosts[0].rank
        records, own = RunDir.of_checkpoint(found.folder).metrics, self.dir.metrics
        size = 0
        if ranks.rank == holder:
            with contextlib.suppress(OSError):  # a run may have none
                size = records.stat().st_size
        pieces = _sent([(holder, records, ranks.gather(size)[holder])], group)
        problem = ""
        if keeps and ranks.rank != self.file_systems.writer_of[holder]:  # there they are already
            try:
                with replacing(own) as copy:
                    for _, piece in pieces:
                        copy.write(piece)
            except OSError as error:
                problem = f"cannot keep a copy of {records.name}: {error}"
        ranks.warn(_finish(pieces, f"cannot send {records.name}") or problem)

    def set_newer_aside(self, step: int) -> None:
        """Rename the checkpoints of later steps: a restart would resume from the newest of them.

        All ranks must call this.

        Raises:
            UserError, JobFailed: they cannot be renamed.
        """
        root = self.dir.checkpoints
        with self.ranks.together():
            try:
                moved = directory.set_aside(root, step) if self.is_writer else []
            except OSError as error:
                sentence = f"{root}: cannot rename the newer checkpoints: {error.strerror}."
                raise cause_of(error, has_run=True)(sentence) from None
        for folder in moved:
            log.info(
                f"renamed to {folder.name}: its step is later than the one this run resumes from"
            )

    def close(self, *, removes_new: bool = False) -> None:
        """Give the folder up.

        Args:
            removes_new: remove the folders that `open_run` has created, if they are empty.
        """
        if self.owner is not None:
            self.owner.release()
        if removes_new and self.is_writer:
            for folder in (self.dir.checkpoints, self.dir.path):
                with contextlib.suppress(OSError):
                    folder.rmdir()


def open_run(folder: RunDir, ranks: Ranks) -> Run:
    """Create the run's folder on every host, and become its owner. All ranks must call this.

    Raises:
        UserError: the folder cannot be written, or another run owns it.
        JobFailed: a disk has failed.
    """
    with ranks.together(), writing(folder):
        folder.checkpoints.mkdir(parents=True, exist_ok=True)
    file_systems = find_file_systems(folder, ranks)
    owner: RunOwner | None = None
    try:
        with ranks.together(), writing(folder):
            if ranks.rank in file_systems.writers:
                run_id = os.environ.get(RUN_ID) or secrets.token_hex(8)
                owner = own(folder, run_id, on_wait=lambda sentence: log.info(sentence))
    except BaseException:
        if owner is not None:
            owner.release()
        raise
    return Run(folder, ranks, file_systems, owner)


def _sent(
    files: Sequence[tuple[int, Path, int]], group: dist.ProcessGroup
) -> Iterator[tuple[str, memoryview]]:
    """The pieces of each file, on every rank, with its name. Each step of this iterator is a broadcast.

    Args:
        files: the rank that sends it, its path there, and its size in bytes; the same on every rank.

    Raises:
        OSError: this rank could not read a file. It is raised after the last piece, because the other ranks
            wait for all of them; those that keep the file find another SHA-256.
    """
    problem: OSError | None = None
    for source, path, size in files:
        with contextlib.ExitStack() as stack:
            file = None
            for start in range(0, size, CHUNK_BYTES):
                chunk = empty_chunk(size - start)
                if dist.get_rank() == source:
                    try:
                        file = file or stack.enter_context(path.open("rb"))
                        file.readinto(bytes_of(chunk))
                    except OSError as error:
                        problem = error
                dist.broadcast(chunk, source, group=group)
                yield path.name, bytes_of(chunk)
    if problem is not None:
        raise problem


def _finish(pieces: Iterator[tuple[str, memoryview]], what: str) -> str:
    """Take part in the remaining broadcasts. Returns the problem if this rank cannot read a file, else ""."""
    try:
        for _ in pieces:
            pass
    except OSError as error:
        return f"{what}: {error.strerror}."
    return ""


def empty_chunk(num_bytes: int) -> Tensor:
    """Memory for the next chunk of a file of which `num_bytes` are left: uint8 [at most CHUNK_BYTES]."""
    return torch.empty(min(num_bytes, CHUNK_BYTES), dtype=torch.uint8)


def bytes_of(chunk: Tensor) -> memoryview:
    return memoryview(chunk.numpy())  # type: ignore[arg-type]


def _receive(
    folder: Path, pieces: Iterator[tuple[str, memoryview]], found: Found
) -> dict[str, str]:
    """Write the pieces of files into the folder, and compare their SHA-256 with those that were saved.

    Raises:
        BrokenCheckpoint: a file has arrived damaged.
        OSError: the disk is full, …
    """
    hashes: dict[str, str] = {}
    name, file = "", None
    for each, piece in pieces:
        if each != name:
            if file is not None:
                hashes[name] = file.close()
            name, file = each, HashedFile(folder / each)
        assert file is not None
        file.write(piece)
    if file is not None:
        hashes[name] = file.close()
    for name, digest in hashes.items():
        if digest != found.files[name].sha256:
            raise BrokenCheckpoint(f"{name} arrived damaged: its SHA-256 differs")
    return hashes
