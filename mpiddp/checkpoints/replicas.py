"""Hosts that share no file system each keep the checkpoints, so that the loss of any host loses nothing.

A host that lacks the newest checkpoint receives a copy, and verifies its SHA-256. `file_systems` finds out
which hosts share one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from mpiddp.checkpoints import directory
from mpiddp.checkpoints.directory import BrokenCheckpoint, HashedFile
from mpiddp.checkpoints.file_chunks import chunks
from mpiddp.checkpoints.run_dir import RunDir
from mpiddp.checkpoints.saved import Received, TensorGroup, broadcast
from mpiddp.checkpoints.search import Start
from mpiddp.checkpoints.shards import index
from mpiddp.checkpoints.shards.fetch import fetch_shards
from mpiddp.checkpoints.shards.index import ShardIndex
from mpiddp.checkpoints.shards.read import ShardFiles
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.log import log

Common = TypeVar("Common")


def receive(
    start: Start[Common],
    run: RunDir,
    writer_ranks: list[int],
    coordinator: Coordinator,
    group: TensorGroup | None,
    *,
    timeout_s: float,
) -> tuple[Received[Common] | None, ShardFiles | None]:
    """Send the checkpoint to resume from to every rank, and its files to the hosts that lack them.

    Of a sharded one, the files of shards become available on every host until it saves. The copies of a
    lost host are made again by the next save.

    A collective: every rank must call it.

    Args:
        group: None if the job has one rank.

    Returns:
        The part of this rank; None if there is nothing to resume from. And the files of its sharded
        tensors; None if it has none.
    """
    receivers = [rank for rank in start.lacking if rank in writer_ranks]
    if start.folder is not None and receivers:
        assert group is not None  # another rank has it
        problems = [""]
        if not start.holders:
            problems += _send_checkpoint(start, receivers, run, coordinator, group, timeout_s)
        problems += _send_records(start, receivers, run, coordinator, group, timeout_s)
        problem = next((each for each in problems if each), "")
        warn(coordinator, coordinator.all_gather_json(problem, timeout_s=timeout_s))
    received = broadcast(start.saved, start.holder, group)
    if not start.holders:
        return received, None
    files = fetch_shards(
        broadcast_index(start, group),
        start.holders,
        run.checkpoints,
        coordinator,
        group,
        timeout_s=timeout_s,
    )
    return received, files


def broadcast_index(start: Start[Common], group: TensorGroup | None) -> ShardIndex:
    """The index of the sharded checkpoint, on every rank. A collective."""
    box: list[ShardIndex | None] = [None]
    if start.saved is not None and start.folder is not None:
        box = [index.read(start.folder)]
    if group is not None:
        dist.broadcast_object_list(box, start.holder, group=group.group)
    assert box[0] is not None, "the search has read it"
    return box[0]


def _send_checkpoint(
    start: Start[Common],
    receivers: list[int],
    run: RunDir,
    coordinator: Coordinator,
    group: TensorGroup,
    timeout_s: float,
) -> list[str]:
    """Copy the checkpoint from which the run resumes to the hosts that lack it. A collective.

    A host that cannot store the copy causes only a warning, because the training already has the
    contents.

    Returns:
        The problems of this rank.
    """
    folder, holder = start.folder, start.holder
    assert folder is not None
    own_files = _files(folder) if coordinator.world.rank == holder else []
    files = coordinator.all_gather_json(own_files, timeout_s=timeout_s)[holder]
    problems = []
    pieces = chunks(holder, folder, files, group)
    if coordinator.world.rank in receivers:
        step = directory.step_of(folder)
        try:
            directory.write(run.checkpoints, step, lambda f: _receive(f, pieces))
        except (OSError, BrokenCheckpoint) as error:
            problems = [f"cannot keep a copy of {folder.name}: {error}"]
    for _ in pieces:  # every rank takes part in every broadcast
        pass
    return problems


def _send_records(
    start: Start[Common],
    receivers: list[int],
    run: RunDir,
    coordinator: Coordinator,
    group: TensorGroup,
    timeout_s: float,
) -> list[str]:
    """Copy the records of the run to the hosts that lack them, as `_send_checkpoint`."""
    assert start.folder is not None
    records = RunDir.of_checkpoint(start.folder).metrics
    is_holder = coordinator.world.rank == start.holder
    own_size = records.stat().st_size if is_holder and records.exists() else 0
    size = coordinator.all_gather_json(own_size, timeout_s=timeout_s)[start.holder]
    problems = []
    pieces = chunks(start.holder, records.parent, [(records.name, size)], group)
    if coordinator.world.rank in receivers:
        try:
            copy = HashedFile(run.metrics)
            for _, piece in pieces:
                copy.write(piece)
            copy.close()
        except OSError as error:
            problems = [f"cannot keep a copy of {run.metrics.name}: {error}"]
    for _ in pieces:  # every rank takes part in every broadcast
        pass
    return problems


def warn(coordinator: Coordinator, problems: list[str]) -> None:
    """Rank 0 prints the problem of each rank after the name of its host. "" is no problem."""
    if coordinator.world.rank == 0:
        for host, problem in zip(coordinator.hostnames, problems, strict=True):
            if problem:
                log.warning(f"warning: {host}: {problem}")


def _files(folder: Path) -> list[tuple[str, int]]:
    """The names and sizes of the files to send, the manifest first.

    COMPLETE is not sent. The receiver writes it when all files have arrived.
    """
    contents = [path for path in folder.iterdir() if path.name != directory.COMPLETE]
    contents.sort(key=lambda path: (path.name != directory.MANIFEST, path.name))
    return [(path.name, path.stat().st_size) for path in contents]


def _receive(folder: Path, pieces: Iterator[tuple[str, memoryview]]) -> dict[str, str]:
    """Write the received pieces, and compare the files with the manifest, which arrives first.

    Raises:
        BrokenCheckpoint: a file differs from the manifest.
        OSError: the disk is full, …
    """
    manifest = b""
    open_files: dict[str, HashedFile] = {}
    for name, piece in pieces:
        if name == directory.MANIFEST:
            manifest += piece
        else:
            if name not in open_files:
                open_files[name] = HashedFile(folder / name)
            open_files[name].write(piece)
    hashes = {name: file.close() for name, file in open_files.items()}
    directory.check_hashes(manifest, hashes)
    return hashes
