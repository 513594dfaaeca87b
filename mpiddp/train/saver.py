"""Save the state of a training: what `mpiddp train` puts into a checkpoint, and when it may not fail."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mpiddp.checkpoints import saver
from mpiddp.checkpoints.agreement import PATIENCE_S
from mpiddp.checkpoints.file_systems import FileSystems
from mpiddp.checkpoints.owner import RunOwner
from mpiddp.checkpoints.saved import Saved, TensorGroup
from mpiddp.errors import JobFailed
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.train import checkpoint
from mpiddp.train.checkpoint import Contents, Progress
from mpiddp.train.config import TrainConfig
from mpiddp.train.engine import TrainState, averaged_buffers
from mpiddp.train.parallel import is_sharded


class Saver:
    """Saves the state of a training on the writer ranks. Every rank has a saver."""

    def __init__(
        self,
        root: Path,
        file_systems: FileSystems,
        coordinator: Coordinator,
        state: TrainState,
        config: TrainConfig,
        data: str,
        owner: RunOwner | None = None,
    ) -> None:
        """
        Args:
            root: the folder of checkpoints.
            file_systems: those on which it lies.
            state: the bare model, its optimizer and its scaler.
            data: the contents of the data set, see `Data`.
            owner: of the run's folder, on the writer ranks.
        """
        self._state = state
        self._config = config
        self._data = data
        self._coordinator = coordinator
        parameters = list(state.model.parameters())
        self._saver = saver.Saver(
            root,
            file_systems,
            coordinator,
            TensorGroup(parameters[0].device),
            keep=config.keep,
            must_succeed=config.on_save_error == "stop",
            timeout_s=max(config.timeout, PATIENCE_S),
            owner=owner,
            expected=_expected(
                state.model, is_writer=coordinator.world.rank in file_systems.writers
            ),
        )

    def save(self, progress: Progress) -> None:
        """Start to save the checkpoint of this step. A collective: every rank must call it.

        Raises:
            SystemExit: the previous save has failed, and --on-save-error is stop. Rank 0 has printed
                the error.
        """
        state = self._state
        with self._exiting():
            ranks = self._saver.gather(checkpoint.rank_state(state.model))
        with averaged_buffers(state.model):
            trainer = {
                "optimizer": state.optimizer.state_dict(),
                "scaler": state.scaler.state_dict(),
            }
            contents = {"model": state.model.state_dict(), "trainer": trainer}
            if self._saver.is_writer or is_sharded(state.model):
                self._saver.start(
                    progress.step, {"progress": progress, **contents}, ranks, self._write_files
                )

    def finish(self) -> None:
        """Wait for the last save. A collective: every rank must call it.

        Raises:
            SystemExit: the save has failed. Rank 0 has printed the error.
        """
        with self._exiting():
            self._saver.finish()

    @contextlib.contextmanager
    def _exiting(self) -> Iterator[None]:
        """Exit on all ranks together after a failed save, which all ranks raise."""
        try:
            yield
        except JobFailed:
            with self._coordinator.all_or_none():
                raise

    def _write_files(self, folder: Path, saved: Saved[dict[str, Any]]) -> dict[str, str]:
        contents = Contents(**saved.common)
        saved_contents = Saved(contents, saved.ranks, saved.is_sharded)
        return checkpoint.write_files(folder, saved_contents, self._config, self._data)


def _expected(model: nn.Module, *, is_writer: bool) -> list[Tensor]:
    """Tensors like those that this rank will save. The momentum is as large as the parameters."""
    parameters: list[Any] = list(model.parameters())
    if not is_sharded(model):
        return [*model.state_dict().values(), *parameters] if is_writer else []
    with torch.no_grad():
        own = [parameter.to_local() for parameter in parameters]
    return [*own, *own, *(model.buffers() if is_writer else ())]
