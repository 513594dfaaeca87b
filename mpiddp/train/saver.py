"""Save checkpoints beside the training: a step only copies its tensors; a thread writes them to the disk.

At most one save is in flight. The next save waits for it, and there all ranks receive its result, so a
save error needs no synchronization in any other step. A full disk never damages older checkpoints.
"""

from __future__ import annotations

import errno
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from mpiddp.checkpoints import directory
from mpiddp.checkpoints.owner import RunOwner
from mpiddp.checkpoints.replicas import warn
from mpiddp.checkpoints.snapshot import PinnedStaging
from mpiddp.errors import JobFailed
from mpiddp.runtime.coordinator import Coordinator
from mpiddp.runtime.log import log
from mpiddp.runtime.session import saving
from mpiddp.train import checkpoint
from mpiddp.train.checkpoint import Progress
from mpiddp.train.config import TrainConfig
from mpiddp.train.engine import TrainState, averaged_buffers

WRITE_TIMEOUT_S = 1800.0  # a whole checkpoint on a slow disk


class Saver:
    """Saves the state of a training on the writer ranks. Every rank has a saver."""

    def __init__(
        self,
        root: Path,
        writer_ranks: list[int],
        coordinator: Coordinator,
        state: TrainState,
        config: TrainConfig,
        data: str,
        owner: RunOwner | None = None,
    ) -> None:
        """
        Args:
            root: the folder of checkpoints.
            writer_ranks: the ranks that write there, rank 0 first.
            state: the bare model, its optimizer and its scaler.
            data: the contents of the data set, see `Data`.
            owner: of the run's folder, on the writer ranks.
        """
        self._root = root
        self._owner = owner
        self._num_saves = self._num_failed = 0
        self._writer_ranks = writer_ranks
        self._coordinator = coordinator
        self._state = state
        self._config = config
        self._data = data
        self._is_valid: dict[Path, bool] = {}  # checkpoints that this process hashed or wrote
        self._pending: Future[str] | None = None
        self._is_writer = coordinator.world.rank in writer_ranks
        if self._is_writer:
            parameters = list(state.model.parameters())
            expected = [*state.model.state_dict().values(), *parameters]  # momentum is as large
            self._memory = PinnedStaging(expected, parameters[0].device)
            self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def save(self, progress: Progress) -> None:
        """Start to save the checkpoint of this step. A collective: every rank must call it.

        Raises:
            SystemExit: the previous save has failed, and --on-save-error is stop. Rank 0 has printed
                the error.
        """
        self._wait_for_save(must_succeed=self._config.on_save_error == "stop")
        self._num_saves += 1
        state = self._state
        ranks = self._gather_on_writers(checkpoint.rank_state(state.model))
        with averaged_buffers(state.model):
            if not self._is_writer:
                return
            trainer = {
                "optimizer": state.optimizer.state_dict(),
                "scaler": state.scaler.state_dict(),
            }
            contents = self._memory.copy({"model": state.model.state_dict(), "trainer": trainer})
        self._pending = self._writer.submit(self._write, progress, {**contents, "ranks": ranks})

    def finish(self) -> None:
        """Wait for the last save. A collective: every rank must call it.

        Raises:
            SystemExit: the save has failed. This does not depend on --on-save-error, because the last
                checkpoint would be lost.
        """
        self._wait_for_save(must_succeed=True)
        if self._num_failed:
            log.warning(f"warning: {self._num_failed} of {self._num_saves} saves failed.")

    def _wait_for_save(self, *, must_succeed: bool) -> None:
        """Wait for the save in flight, and send its result to all ranks."""
        problem = self._pending.result() if self._pending else ""
        self._pending = None
        timeout_s = max(WRITE_TIMEOUT_S, self._config.timeout)
        problems = self._coordinator.all_gather_json(problem, timeout_s=timeout_s)
        self._num_failed += any(problems)
        if must_succeed and any(problems):
            with self._coordinator.all_or_none():
                if problem:
                    raise JobFailed(problem)
        warn(self._coordinator, problems)

    def _gather_on_writers(self, state: dict[str, Any]) -> list[Any]:
        """Gather every rank's state on the writer ranks: [world_size]."""
        states: list[Any] = [None] * self._coordinator.world.world_size
        if self._writer_ranks == [0]:
            dist.gather_object(state, states if self._is_writer else None)
        else:
            dist.all_gather_object(states, state)
        return states

    def _write(self, progress: Progress, contents: dict[str, Any]) -> str:
        """Write the checkpoint and remove old ones, in the thread. Returns the error, or ""."""
        with saving():
            return self._write_and_prune(progress, contents)

    def _write_and_prune(self, progress: Progress, contents: dict[str, Any]) -> str:
        self._memory.wait()
        try:
            if self._owner is not None:
                self._owner.check()
        except JobFailed as error:
            return str(error)

        def write_files(folder: Path) -> dict[str, str]:
            return checkpoint.write_files(folder, progress, contents, self._config, self._data)

        try:
            self._is_valid[directory.write(self._root, progress.step, write_files)] = True
        except OSError as error:
            return _save_error(error, self._root, progress.step, _num_bytes(contents))
        try:
            directory.prune(self._root, self._config.keep, counts_as_kept=self._is_intact)
        except OSError as error:  # the new checkpoint is complete anyway
            log.warning(f"warning: {self._root}: cannot remove old checkpoints: {error.strerror}.")
        return ""

    def _is_intact(self, folder: Path) -> bool:
        """Hash a checkpoint the first time; afterwards, and for those written here, compare sizes only."""
        if folder not in self._is_valid:
            self._is_valid[folder] = directory.is_valid(folder)
        return self._is_valid[folder] and directory.is_whole(folder)


def _save_error(error: OSError, root: Path, step: int, num_bytes: int) -> str:
    """The error, and the newest checkpoint that remains."""
    kept = [folder.name for folder in directory.list_steps(root)]
    rest = f"{kept[-1]} is kept." if kept else "There is no older checkpoint."
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(root).free
        return (
            f"no space left for a checkpoint in {root}: step {step} needs {_size(num_bytes)}, "
            f"has {_size(free)}. {rest}"
        )
    return f"{root}: cannot write the checkpoint of step {step}: {error.strerror}. {rest}"


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
