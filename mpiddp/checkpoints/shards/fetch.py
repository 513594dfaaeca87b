"""Bring the files of shards that a host lacks to it, when a run resumes.

A host keeps the shards of its own ranks and of one other host. After a restart on other hosts, or with
another number of ranks, a rank may need any of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpiddp.checkpoints import directory
from mpiddp.checkpoints.agreement import raised_by_all
from mpiddp.checkpoints.directory import HashedFile
from mpiddp.checkpoints.file_chunks import chunks
from mpiddp.checkpoints.saved import TensorGroup
from mpiddp.checkpoints.shards.index import ShardIndex
from mpiddp.checkpoints.shards.read import ShardFiles
from mpiddp.errors import JobFailed
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.log import log
from mpiddp.text import counted


@dataclass(frozen=True)
class Holder:
    """A host with a valid folder of the checkpoint: one of its ranks, and the files that it lacks."""

    rank: int
    node: int | None
    folder: str
    lacks: frozenset[str]


def fetch_shards(
    index: ShardIndex,
    holders: Sequence[Holder],
    root: Path,
    coordinator: Coordinator,
    group: TensorGroup | None,
    *,
    timeout_s: float,
) -> ShardFiles:
    """Send each host the files that it lacks, into a hidden folder that its next save removes.

    A collective: every rank must call it.

    Args:
        holders: of all files together.
        root: the run's folder of checkpoints.
        group: None if the job has one rank.

    Raises:
        JobFailed: a host cannot store a file.
    """
    world = coordinator.world
    by_node = {holder.node: holder for holder in holders}
    nodes = set(coordinator.all_gather_json(world.node_rank, timeout_s=timeout_s))
    lacking = [
        name
        for name in index.files
        if any(node not in by_node or name in by_node[node].lacks for node in nodes)
    ]
    own = by_node.get(world.node_rank)
    folders = {name: Path(own.folder) for name in index.files if own and name not in own.lacks}
    if not lacking:
        return ShardFiles(index, folders)
    assert group is not None, "another host has them"
    digest = hashlib.sha256(index.as_json().encode()).hexdigest()
    received = directory.hidden(root, f"received-{digest[:16]}")
    log.info(f"sending {counted(len(lacking), 'file')} of shards to the hosts that lack them")
    problem = ""
    for name in lacking:
        keeps = name not in folders and world.local_rank == 0
        problem = _receive(name, index, holders, received if keeps else None, group) or problem
        if name not in folders:
            folders[name] = received
    with raised_by_all(coordinator, timeout_s=timeout_s):
        if problem:
            raise JobFailed(f"{received}: cannot keep the shards of other hosts: {problem}.")
    return ShardFiles(index, folders)


def _receive(
    name: str,
    index: ShardIndex,
    holders: Sequence[Holder],
    folder: Path | None,
    group: TensorGroup,
) -> str:
    """Broadcast a file, and write it into the folder, if any. Returns a problem, or ""."""
    entry = index.files[name]
    source = next(holder for holder in holders if name not in holder.lacks)
    file, problem = None, ""
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            file = HashedFile(folder / name)
    except OSError as error:
        problem = error.strerror or str(error)
    for _, piece in chunks(source.rank, Path(source.folder), [(name, entry.bytes)], group):
        if file is not None:
            file.write(piece)
    try:
        if file is not None and file.close() != entry.sha256:
            return f"{name} arrived damaged"
    except OSError as error:
        return error.strerror or str(error)
    return problem
