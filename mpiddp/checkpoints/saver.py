"""Save checkpoints beside the training: a step only copies its tensors; a thread writes them to the disk.

At most one save is in flight. The next save waits for it, and there all ranks receive its result, so a
save error needs no synchronization in any other step. A full disk never damages older checkpoints.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from mpiddp.checkpoints import directory
from mpiddp.checkpoints.agreement import PATIENCE_S, raised_by_all
from mpiddp.checkpoints.file_systems import FileSystems
from mpiddp.checkpoints.owner import RunOwner
from mpiddp.checkpoints.replicas import warn
from mpiddp.checkpoints.saved import RankState, Saved, TensorGroup
from mpiddp.checkpoints.shards import inventory
from mpiddp.checkpoints.shards.exchange import NoExchange
from mpiddp.checkpoints.shards.index import SavedTensor
from mpiddp.checkpoints.shards.saver import ShardSaver
from mpiddp.checkpoints.shards.state import split
from mpiddp.checkpoints.shards.write import NotSaved, ShardSave
from mpiddp.checkpoints.snapshot import PinnedStaging
from mpiddp.errors import JobFailed, NoAnswer
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.launcher.connected import saving
from mpiddp.runtime.log import log

# Writes the files of a checkpoint into a folder, and returns the SHA-256 of those that it has hashed.
WriteFiles = Callable[[Path, Saved[Any]], Mapping[str, str]]


class Saver:
    """Saves the state of a training on the writer ranks. Every rank has a saver."""

    def __init__(
        self,
        root: Path,
        file_systems: FileSystems,
        coordinator: Coordinator,
        group: TensorGroup | None,
        *,
        keep: int,
        must_succeed: bool,
        timeout_s: float = PATIENCE_S,
        owner: RunOwner | None = None,
        expected: Iterable[Tensor] = (),
    ) -> None:
        """
        Args:
            root: the folder of checkpoints.
            file_systems: those on which it lies.
            group: gathers the states of the ranks; None if the job has one rank.
            keep: number of valid checkpoints to keep.
            must_succeed: whether a failed save ends the run; else it causes a warning.
            timeout_s: how long to wait for a rank that does not answer.
            owner: of the run's folder, on the writer ranks.
            expected: tensors like those that will be saved, so that no step waits for memory.
        """
        self._root = root
        self._owner = owner
        self._keep = keep
        self._must_succeed = must_succeed
        self._timeout_s = timeout_s
        self._num_saves = self._num_failed = 0
        self._file_systems = file_systems
        self.writer_ranks = file_systems.writers
        self._coordinator = coordinator
        self._group = group
        self._is_valid: dict[Path, bool] = {}  # checkpoints that this process hashed or wrote
        self._pending: Future[str] | None = None
        self.is_writer = coordinator.world.rank in self.writer_ranks
        self._memory = PinnedStaging(expected)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._shards: ShardSaver | None = None

    def gather(self, own: RankState) -> list[Any]:
        """Begin a save: wait for the previous one, and gather every rank's own state: [world_size].

        A collective: every rank must call it. Only on the writer ranks is the result complete.

        Raises:
            JobFailed: the previous save has failed, and it had to succeed; or a rank did not answer.
        """
        self._wait_for_save(must_succeed=self._must_succeed)
        self._num_saves += 1
        if self._group is None:
            return [own]
        states: list[Any] = [None] * self._coordinator.world.world_size
        if self.writer_ranks == [0]:
            dist.gather_object(own, states if self.is_writer else None, group=self._group.group)
        else:
            dist.all_gather_object(states, own, group=self._group.group)
        return states

    def start(self, step: int, common: Any, ranks: list[Any], write_files: WriteFiles) -> None:
        """Copy the tensors of `common`, and write them in the thread.

        Only writer ranks need to call this, unless `common` holds sharded tensors: then it is a collective.
        """
        replicated, sharded = split(common)
        if sharded:
            self._start_shards(step, replicated, sharded, ranks, write_files)
        elif self.is_writer:
            saved = Saved(self._memory.copy(common), ranks)
            self._pending = self._writer.submit(self._write, step, saved, write_files)

    def _start_shards(
        self,
        step: int,
        replicated: Any,
        sharded: Mapping[str, Tensor],
        ranks: list[Any],
        write_files: WriteFiles,
    ) -> None:
        """Copy this rank's parts of the sharded tensors, and write them in the thread. A collective."""
        if self._shards is None:
            self._shards = ShardSaver(
                self._root,
                self._file_systems,
                self._coordinator,
                self._group,
                timeout_s=self._timeout_s,
            )
        own, layout = self._shards.plan(sharded)
        copied = self._memory.copy((replicated if self.is_writer else None, own))
        saved = Saved(copied[0], ranks, is_sharded=True)
        save = partial(self._shards.begin, step, self._num_saves)
        self._pending = self._writer.submit(
            self._write_shards, save, step, saved, copied[1], layout, write_files
        )

    def finish(self) -> None:
        """Wait for the last save. A collective: every rank must call it.

        Raises:
            JobFailed: the save has failed. This does not depend on `must_succeed`, because the last
                checkpoint would be lost.
        """
        try:
            self._wait_for_save(must_succeed=True)
        finally:
            if self._num_failed and self._coordinator.world.rank == 0:
                log.warning(f"warning: {self._num_failed} of {self._num_saves} saves failed.")

    def wait_for_own_save(self) -> None:
        """Wait until this rank has no save in flight, whether the save succeeds or not. Not a collective."""
        if self._pending is not None:
            wait([self._pending])

    def _wait_for_save(self, *, must_succeed: bool) -> None:
        """Wait for the save in flight, and send its result to all ranks.

        Raises:
            NoAnswer: a rank did not answer, in the thread of this rank or here.
            JobFailed: the save has failed, and it must succeed.
        """
        problem = self._pending.result() if self._pending else ""
        self._pending = None
        problems = self._coordinator.all_gather_json(problem, timeout_s=self._timeout_s)
        self._num_failed += any(problems)
        if must_succeed and any(problems):
            with raised_by_all(self._coordinator):
                if problem:
                    raise JobFailed(problem)
        warn(self._coordinator, problems)

    def _write(self, step: int, saved: Saved[Any], write_files: WriteFiles) -> str:
        """Write the checkpoint and remove old ones, in the thread. Returns the error, or ""."""
        with saving():
            return self._write_and_prune(step, saved, write_files)

    def _write_shards(
        self,
        begin: Callable[[], ShardSave],
        step: int,
        saved: Saved[Any],
        own: Mapping[str, Tensor],
        layout: Mapping[str, SavedTensor],
        write_files: WriteFiles,
    ) -> str:
        """Write this rank's part of the checkpoint, in the thread. Returns the error, or "".

        Raises:
            NoAnswer: a rank did not answer.
        """
        with saving():
            self._memory.wait()
            try:
                return self._save_shards(begin(), step, saved, own, layout, write_files)
            except NoExchange as error:
                return f"step {step} was not saved: {error}."

    def _save_shards(
        self,
        save: ShardSave,
        step: int,
        saved: Saved[Any],
        own: Mapping[str, Tensor],
        layout: Mapping[str, SavedTensor],
        write_files: WriteFiles,
    ) -> str:
        """The same, of a save that has begun. Raises NoAnswer, NoExchange."""
        folder, problem = None, ""
        try:
            folder = save.run(own, layout, lambda f: write_files(f, saved), self._check_owner)
        except NoAnswer:
            raise
        except (NotSaved, JobFailed) as error:
            problem = str(error)
        except OSError as error:
            problem = _save_error(
                error, self._root, step, _num_bytes([saved.common, *saved.ranks, dict(own)])
            )
        if self.is_writer and save.commit(folder) and folder is not None:
            self._prune(folder)
        return problem

    def _check_owner(self) -> None:
        """Raise JobFailed if another run has taken the folder."""
        if self._owner is not None:
            self._owner.check()

    def _write_and_prune(self, step: int, saved: Saved[Any], write_files: WriteFiles) -> str:
        self._memory.wait()
        try:
            self._check_owner()
        except JobFailed as error:
            return str(error)
        try:
            folder = directory.write(self._root, step, lambda folder: write_files(folder, saved))
        except OSError as error:
            return _save_error(error, self._root, step, _num_bytes([saved.common, *saved.ranks]))
        self._prune(folder)
        return ""

    def _prune(self, written: Path) -> None:
        """Remove checkpoints that are older than those to keep."""
        self._is_valid[written] = True
        try:
            directory.prune(self._root, self._keep, counts_as_kept=self._is_intact)
        except OSError as error:  # the new checkpoint is complete anyway
            log.warning(f"warning: {self._root}: cannot remove old checkpoints: {error.strerror}.")

    def _is_intact(self, folder: Path) -> bool:
        """Hash a checkpoint the first time; afterwards, and for those written here, compare sizes only."""
        if folder not in self._is_valid:
            self._is_valid[folder] = inventory.is_valid(folder)
        return self._is_valid[folder] and directory.is_whole(folder)


def _save_error(error: OSError, root: Path, step: int, num_bytes: int) -> str:
    """The error, and the newest checkpoint that remains, if the folder can still be read."""
    sentence = f"{root}: cannot write the checkpoint of step {step}: {error.strerror}."
    try:
        kept = [folder.name for folder in directory.list_steps(root)]
        rest = f"{kept[-1]} is kept." if kept else "There is no older checkpoint."
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(root).free
            return (
                f"no space left for a checkpoint in {root}: step {step} needs {_size(num_bytes)}, "
                f"has {_size(free)}. {rest}"
            )
    except OSError:  # a file server that is gone
        return sentence
    return f"{sentence} {rest}"


def _num_bytes(nested: Any) -> int:
    if isinstance(nested, Tensor):
        return nested.numel() * nested.element_size()
    if isinstance(nested, dict):
        return sum(map(_num_bytes, nested.values()))
    if isinstance(nested, (list, tuple)):
        return sum(map(_num_bytes, nested))
    return 0


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
