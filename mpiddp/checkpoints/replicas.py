"""Hosts that share no file system each keep the checkpoints, so that the loss of any host loses nothing.

Shared file systems are detected: one rank of each host creates a file in the run's folder, and looks for
the files of the others. A host that lacks the newest checkpoint receives a copy, and verifies its SHA-256.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mpiddp.checkpoints import directory
from mpiddp.checkpoints.agreement import raised_by_all
from mpiddp.checkpoints.directory import BrokenCheckpoint, HashedFile
from mpiddp.checkpoints.run_dir import RunDir, unwritable
from mpiddp.checkpoints.saved import Received, TensorGroup, broadcast
from mpiddp.checkpoints.search import Start
from mpiddp.runtime.coordinator import Coordinator
from mpiddp.runtime.log import log

_CHUNK_BYTES = 16 << 20

Common = TypeVar("Common")


def find_writer_ranks(coordinator: Coordinator, run: RunDir, *, timeout_s: float) -> list[int]:
    """The ranks that write into the run's folder: one for each file system on which it lies, rank 0 first.

    All ranks must call this.

    Raises:
        UserError: a host cannot write there.
        JobFailed: a host cannot write there, because its disk has failed.
    """
    own, out = "", run.path
    with raised_by_all(coordinator, timeout_s=timeout_s):
        if coordinator.world.local_rank == 0:
            own = f".seen-by-rank-{coordinator.world.rank}-{secrets.token_hex(8)}"
            try:
                (out / own).touch()
            except OSError as error:
                raise unwritable(run, error) from None
    marks = coordinator.all_gather_json(own, timeout_s=timeout_s)
    seen = [rank for rank, mark in enumerate(marks) if mark and own and (out / mark).exists()]
    # The lowest rank that a host sees writes for all hosts that see the same file system.
    firsts = coordinator.all_gather_json(seen[0] if seen else None, timeout_s=timeout_s)
    if own:
        (out / own).unlink()
    return [rank for rank, first in enumerate(firsts) if first == rank]


def receive(
    start: Start[Common],
    run: RunDir,
    writer_ranks: list[int],
    coordinator: Coordinator,
    group: TensorGroup | None,
    *,
    timeout_s: float,
) -> Received[Common] | None:
    """Send the checkpoint to resume from to every rank, and its files to the hosts that lack them.

    A collective: every rank must call it.

    Args:
        group: None if the job has one rank.

    Returns:
        The part of this rank; None if there is nothing to resume from.
    """
    receivers = [rank for rank in start.lacking if rank in writer_ranks]
    if start.folder is not None and receivers:
        assert group is not None  # another rank has it
        send_missing_checkpoint(
            start.folder, start.holder, receivers, run, coordinator, group, timeout_s=timeout_s
        )
    return broadcast(start.saved, start.holder, group)


def send_missing_checkpoint(
    folder: Path,
    holder: int,
    receivers: list[int],
    run: RunDir,
    coordinator: Coordinator,
    group: TensorGroup,
    *,
    timeout_s: float,
) -> None:
    """Copy the checkpoint from which the run resumes, with its records, to the hosts that lack it.

    A host that cannot store the copy causes only a warning, because the training already has the
    contents. This is a collective: every rank must call it.
    """
    is_receiver = coordinator.world.rank in receivers
    records = RunDir.of_checkpoint(folder).metrics
    own_files = _files(folder, records) if coordinator.world.rank == holder else []
    files = coordinator.all_gather_json(own_files, timeout_s=timeout_s)[holder]
    problem = ""

    chunks = _chunks(holder, folder, files[:-1], group)
    if is_receiver:
        step = directory.step_of(folder)
        try:
            directory.write(run.checkpoints, step, lambda f: _receive(f, chunks))
        except (OSError, BrokenCheckpoint) as error:
            problem = f"cannot keep a copy of {folder.name}: {error}"
    for _ in chunks:  # every rank takes part in every broadcast
        pass

    copy = HashedFile(run.metrics) if is_receiver else None
    for _, piece in _chunks(holder, records.parent, files[-1:], group):
        if copy is not None:
            copy.write(piece)
    if copy is not None:
        try:
            copy.close()
        except OSError as error:
            problem = problem or f"cannot keep a copy of {run.metrics.name}: {error}"
    warn(coordinator, coordinator.all_gather_json(problem, timeout_s=timeout_s))


def warn(coordinator: Coordinator, problems: list[str]) -> None:
    """Rank 0 prints the problem of each rank after the name of its host. "" is no problem."""
    if coordinator.world.rank == 0:
        for host, problem in zip(coordinator.hostnames, problems, strict=True):
            if problem:
                log.warning(f"warning: {host}: {problem}")


def _files(folder: Path, records: Path) -> list[tuple[str, int]]:
    """The names and sizes of the files to send: the manifest, the other files, and the records last.

    COMPLETE is not sent. The receiver writes it when all files have arrived.
    """
    contents = [path for path in folder.iterdir() if path.name != directory.COMPLETE]
    contents.sort(key=lambda path: (path.name != directory.MANIFEST, path.name))
    return [
        *((path.name, path.stat().st_size) for path in contents),
        (records.name, records.stat().st_size if records.exists() else 0),
    ]


def _chunks(
    source: int, folder: Path, files: list[tuple[str, int]], group: TensorGroup
) -> Iterator[tuple[str, memoryview]]:
    """The pieces of each file, on every rank. Each step of this iterator is a broadcast."""
    for name, size in files:
        with contextlib.ExitStack() as stack:
            is_source = dist.get_rank() == source
            file = stack.enter_context((folder / name).open("rb")) if is_source and size else None
            for start in range(0, size, _CHUNK_BYTES):
                chunk = torch.empty(min(_CHUNK_BYTES, size - start), dtype=torch.uint8)
                if file is not None:
                    file.readinto(_bytes_of(chunk))
                on_device = chunk.to(group.device)
                dist.broadcast(on_device, source, group=group.group)
                yield name, _bytes_of(on_device.cpu())


def _bytes_of(chunk: Tensor) -> memoryview:
    return memoryview(chunk.numpy())  # type: ignore[arg-type]


def _receive(folder: Path, chunks: Iterator[tuple[str, memoryview]]) -> dict[str, str]:
    """Write the received pieces, and compare the files with the manifest, which arrives first.

    Raises:
        BrokenCheckpoint: a file differs from the manifest.
        OSError: the disk is full, …
    """
    manifest = b""
    open_files: dict[str, HashedFile] = {}
    for name, piece in chunks:
        if name == directory.MANIFEST:
            manifest += piece
        else:
            if name not in open_files:
                open_files[name] = HashedFile(folder / name)
            open_files[name].write(piece)
    hashes = {name: file.close() for name, file in open_files.items()}
    directory.check_hashes(manifest, hashes)
    return hashes
