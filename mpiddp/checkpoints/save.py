"""Save checkpoints beside the training: a step only copies its tensors; a thread writes them to the disk.

At most one save is in flight. The next save waits for it, and there all ranks receive its result, so a
save error needs no synchronization in any other step. A full disk never damages older checkpoints.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from mpiddp.checkpoints import directory
from mpiddp.checkpoints.contents import Contents, write_files
from mpiddp.checkpoints.exchange import Exchange, NoExchange
from mpiddp.checkpoints.run import Run
from mpiddp.checkpoints.save_shards import NotSaved, Parts, ShardedSave
from mpiddp.checkpoints.shards import ShardPlan, local_parts, plan_shards
from mpiddp.checkpoints.state import HostMemory, num_bytes, split
from mpiddp.errors import JobFailed, NoAnswer
from mpiddp.runtime.launcher.connected import saving
from mpiddp.runtime.log import log


class Saver:
    """Saves the state of a training. Every rank has one, with the same arguments."""

    def __init__(
        self, run: Run, *, keep: int, must_succeed: bool, verified: Path | None = None
    ) -> None:
        """
        Args:
            keep: number of verified checkpoints to keep.
            must_succeed: whether a failed save ends the run; else it causes a warning.
            verified: a checkpoint that this host has just verified.
        """
        self._run = run
        self._root = run.dir.checkpoints
        self._keep = keep
        self._must_succeed = must_succeed
        self._num_saves = self._num_failed = 0
        # The checkpoints that this process hashed or wrote, and whether they are verified.
        self._is_verified = {verified: True} if verified else {}
        self._pending: Future[str] | None = None
        self._memory = HostMemory()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._sharing: _Sharing | None = None

    def save(self, step: int, state: dict[str, Any], own: Any, config: Mapping[str, Any]) -> None:
        """Wait for the previous save, copy the state, and write it in the thread. A collective.

        Args:
            own: the state of this rank alone, on the CPU.

        Raises:
            JobFailed: the previous save has failed, and it had to succeed; or a rank did not answer.
        """
        self._wait_for_save(must_succeed=self._must_succeed)
        self._num_saves += 1
        saved = Contents(step, {}, self._gather(own), config)
        replicated, sharded = split(state)
        if sharded:
            self._start_shards(saved, replicated, sharded)
        elif self._run.is_writer:
            saved.state.update(self._memory.copy(replicated))
            self._pending = self._thread.submit(self._write, saved, None)

    def _gather(self, own: Any) -> list[Any]:
        """Every rank's own state, complete on the writer ranks: [world_size]. A collective."""
        group = self._run.ranks.group
        if group is None:
            return [own]
        states: list[Any] = [None] * self._run.ranks.coordinator.world.world_size
        if self._run.file_systems.writers == [0]:
            is_rank_0 = self._run.ranks.rank == 0
            dist.gather_object(own, states if is_rank_0 else None, group=group)
        else:
            dist.all_gather_object(states, own, group=group)
        return states

    def _start_shards(
        self, saved: Contents, replicated: dict[str, Any], sharded: Mapping[str, Tensor]
    ) -> None:
        """Copy this rank's parts of the sharded tensors, and write them in the thread. A collective."""
        if self._sharing is None:
            self._sharing = _Sharing(self._run)
        plan = self._sharing.plan(sharded)
        own = local_parts(sharded, plan.own)
        copied, parts = self._memory.copy((replicated if self._run.is_writer else {}, own))
        saved.state.update(copied)
        layout = Parts(parts, plan.tensors, self._num_saves)
        self._pending = self._thread.submit(self._write, saved, layout)

    def finish(self) -> None:
        """Wait for the last save. A collective: every rank must call it.

        Raises:
            JobFailed: the save has failed. This does not depend on `must_succeed`, because the last
                checkpoint would be lost.
        """
        try:
            self._wait_for_save(must_succeed=True)
        finally:
            if self._num_failed and self._run.ranks.rank == 0:
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
        ranks = self._run.ranks
        if must_succeed:
            try:
                with ranks.together():
                    if problem:
                        raise JobFailed(problem)
            except JobFailed:
                self._num_failed += 1
                raise
        else:
            self._num_failed += ranks.warn(problem)

    # In the thread

    def _write(self, saved: Contents, parts: Parts | None) -> str:
        """Write this rank's part of the checkpoint and remove old ones. Returns the error, or "".

        Raises:
            NoAnswer: a rank did not answer.
        """
        with saving():
            self._memory.wait()
            try:
                if parts is None:
                    self._write_whole(saved)
                else:
                    self._write_parts(saved, parts)
            except NoExchange as error:
                return f"step {saved.step} was not saved: {error}."
            except NoAnswer:
                raise
            except (NotSaved, JobFailed) as error:
                return str(error)
            except OSError as error:
                needed = num_bytes([saved.state, saved.ranks, dict(parts.own) if parts else {}])
                return _save_error(error, self._root, saved.step, needed)
        return ""

    def _write_whole(self, saved: Contents) -> None:
        self._run.check_owner()
        self._prune(
            directory.write(self._root, saved.step, lambda folder: write_files(folder, saved))
        )

    def _write_parts(self, saved: Contents, parts: Parts) -> None:
        assert self._sharing is not None
        save = self._sharing.begin(saved.step, parts)
        folder: Path | None = None
        problem: Exception | None = None
        try:
            folder = save.run(lambda new: write_files(new, saved))
        except NoAnswer:
            raise
        except (NotSaved, JobFailed, OSError) as error:
            problem = error
        if self._run.is_writer and save.commit(folder) and folder is not None:
            self._prune(folder)
        if problem is not None:
            raise problem

    def _prune(self, written: Path) -> None:
        """Remove checkpoints that are older than those to keep."""
        self._is_verified[written] = True
        try:
            directory.prune(self._root, self._keep, counts=self._counts)
        except OSError as error:  # the new checkpoint is complete anyway
            log.warning(f"warning: {self._root}: cannot remove old checkpoints: {error.strerror}.")

    def _counts(self, folder: Path) -> bool:
        """Hash a checkpoint the first time; afterwards, and for those written here, compare sizes only."""
        if folder not in self._is_verified:
            self._is_verified[folder] = directory.is_verified(folder)
        return self._is_verified[folder] and directory.is_intact(folder)


class _Sharing:
    """What the sharded saves of a run have in common: the plan, and the group that carries copies."""

    def __init__(self, run: Run) -> None:
        """A collective: every rank must create one."""
        ranks, writers = run.ranks, run.file_systems.writers
        self._run = run
        self._plan: ShardPlan | None = None
        self._prefix = ranks.coordinator.unique_prefix("shards")
        self._previous: Exchange | None = None
        self._copies: dist.ProcessGroup | None = None
        if len(writers) > 1:
            timeout = timedelta(seconds=ranks.timeout_s)
            self._copies = dist.new_group(backend="gloo", timeout=timeout)
        elif (ranks.coordinator.world.num_nodes or 1) == 1:
            log.info(
                "sharded checkpoints: one host holds every shard once. The shards of several hosts "
                "without a shared file system lie on two hosts each."
            )

    def plan(self, sharded: Mapping[str, Tensor]) -> ShardPlan:
        """Which rank saves which part of these tensors. A collective."""
        self._plan = plan_shards(sharded, self._run.ranks.group, self._plan)
        return self._plan

    def begin(self, step: int, parts: Parts) -> ShardedSave:
        """The save of a step, in the thread."""
        if self._previous is not None:  # all ranks have finished it
            self._previous.forget()
        ranks = self._run.ranks
        prefix = f"{self._prefix}/{parts.number}"
        exchange = Exchange(ranks.coordinator, prefix, ranks.timeout_s)
        self._previous = exchange
        return ShardedSave(self._run, step, parts, exchange, self._copies)


def _save_error(error: OSError, root: Path, step: int, needed: int) -> str:
    """The error, and the newest checkpoint that remains, if the folder can still be read."""
    sentence = f"{root}: cannot write the checkpoint of step {step}: {error.strerror}."
    try:
        kept = [folder.name for folder in directory.list_steps(root)]
        rest = f"{kept[-1]} is kept." if kept else "There is no older checkpoint."
        if error.errno == errno.ENOSPC:
            found = f"has {_size(shutil.disk_usage(root).free)}"
        elif error.errno == errno.EDQUOT:  # the file system may have space, for others
            found = "and your disk quota is used up"
        else:
            return f"{sentence} {rest}"
    except OSError:  # a file server that is gone
        return sentence
    where = f"no space left for a checkpoint in {root}"
    return f"{where}: step {step} needs {_size(needed)}, {found}. {rest}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
