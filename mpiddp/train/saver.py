"""Checkpoints off the training path: a step only copies its tensors, a thread writes them to the disk.

One save at most is in flight, and the next one waits for it; there all ranks learn how it ended. So a
full disk costs no synchronization in any other step, and never takes the older checkpoints with it.
"""

from __future__ import annotations

import errno
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpiddp.checkpoints import directory
from mpiddp.checkpoints.replicas import warn
from mpiddp.checkpoints.snapshot import PinnedStaging
from mpiddp.errors import UserError
from mpiddp.runtime.coordinator import Coordinator
from mpiddp.runtime.log import log
from mpiddp.train import checkpoint
from mpiddp.train.checkpoint import Progress
from mpiddp.train.config import TrainConfig
from mpiddp.train.engine import averaged_buffers

WRITE_TIMEOUT_S = 1800.0  # for a slow disk to take a whole checkpoint


class Saver:
    """Saves the training that it is given, on the ranks that keep a copy. Every rank has one."""

    def __init__(
        self,
        root: Path,
        writer_ranks: list[int],
        coordinator: Coordinator,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        config: TrainConfig,
        data: str,
    ) -> None:
        """
        Args:
            root: the folder of checkpoints.
            writer_ranks: the ranks that write there, rank 0 first.
            data: the contents of the data set, see `Data`.
        """
        self._root = root
        self._writer_ranks = writer_ranks
        self._coordinator = coordinator
        self._model = model
        self._optimizer = optimizer
        self._scaler = scaler
        self._config = config
        self._data = data
        self._is_valid: dict[Path, bool] = {}  # of checkpoints that were hashed, or written here
        self._pending: Future[str] | None = None
        self._is_writer = coordinator.world.rank in writer_ranks
        if self._is_writer:
            parameters = list(model.parameters())
            expected = [*model.state_dict().values(), *parameters]  # and as much of momentum
            self._memory = PinnedStaging(expected, parameters[0].device)
            self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def save(self, progress: Progress) -> None:
        """Begin the checkpoint of this step. A collective: every rank must call it.

        Raises:
            SystemExit: the one before has failed, and --on-save-error is stop; rank 0 has said so.
        """
        self._wait_for_save(must_succeed=self._config.on_save_error == "stop")
        ranks = self._gathered(checkpoint.rank_state(self._model))
        with averaged_buffers(self._model):
            if not self._is_writer:
                return
            trainer = {
                "optimizer": self._optimizer.state_dict(),
                "scaler": self._scaler.state_dict(),
            }
            contents = self._memory.copy({"model": self._model.state_dict(), "trainer": trainer})
        self._pending = self._writer.submit(self._write, progress, {**contents, "ranks": ranks})

    def finish(self) -> None:
        """Wait for the last save. A collective: every rank must call it.

        Raises:
            SystemExit: it has failed, whatever --on-save-error: its results would be lost.
        """
        self._wait_for_save(must_succeed=True)

    def _wait_for_save(self, *, must_succeed: bool) -> None:
        """Wait for the save in flight, and tell all ranks how it ended."""
        problem = self._pending.result() if self._pending else ""
        self._pending = None
        timeout_s = max(WRITE_TIMEOUT_S, self._config.timeout)
        problems = self._coordinator.all_gather_json(problem, timeout_s=timeout_s)
        if must_succeed and any(problems):
            with self._coordinator.all_or_none():
                if problem:
                    raise UserError(problem)
        warn(self._coordinator, problems)

    def _gathered(self, state: dict[str, Any]) -> list[Any]:
        """Every rank's state on the writer_ranks: [world_size]."""
        states: list[Any] = [None] * self._coordinator.world.world_size
        if self._writer_ranks == [0]:
            dist.gather_object(state, states if self._is_writer else None)
        else:
            dist.all_gather_object(states, state)
        return states

    def _write(self, progress: Progress, contents: dict[str, Any]) -> str:
        """In the thread: the checkpoint and the removal of old ones. Returns what went wrong, or ""."""
        self._memory.wait()

        def write_files(folder: Path) -> dict[str, str]:
            return checkpoint.write_files(folder, progress, contents, self._config, self._data)

        try:
            self._is_valid[directory.write(self._root, progress.step, write_files)] = True
        except OSError as error:
            return _sentence(error, self._root, progress.step, _num_bytes(contents))
        try:
            directory.prune(self._root, self._config.keep, counts_as_kept=self._is_intact)
        except OSError as error:  # this one is safe all the same
            log.warning(
                f"warning: {self._root}: no old checkpoint can be removed: {error.strerror}."
            )
        return ""

    def _is_intact(self, folder: Path) -> bool:
        """Hash a checkpoint the first time it is seen; afterwards compare sizes only.

        One that this process wrote counts as seen.
        """
        if folder not in self._is_valid:
            self._is_valid[folder] = directory.is_valid(folder)
        return self._is_valid[folder] and directory.is_whole(folder)


def _sentence(error: OSError, root: Path, step: int, num_bytes: int) -> str:
    """What is wrong, and what is left."""
    kept = [folder.name for folder in directory.list_steps(root)]
    rest = f"{kept[-1]} is kept." if kept else "There is no older one."
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        has = shutil.disk_usage(root).free
        return (
            f"no space left for a checkpoint in {root}: step {step} needs {_size(num_bytes)}, "
            f"has {_size(has)}. {rest}"
        )
    return f"{root}: no checkpoint of step {step} can be written: {error.strerror}. {rest}"


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
