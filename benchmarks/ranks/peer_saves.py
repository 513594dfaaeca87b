"""Saves of other programs, for `benchmarks.ranks.saving`: each as its documentation has it for DDP."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.support import frameworks

State = dict[str, Any]


class PeerSave(Protocol):
    """How another program saves. All ranks call both functions."""

    def save(self, state: State, path: Path) -> None:
        """Begin a save; `path` does not exist yet."""

    def wait(self) -> None:
        """Wait until the save is complete."""


class TorchSave:
    """torch.save in rank 0, for which the other ranks wait."""

    def save(self, state: State, path: Path) -> None:
        if dist.get_rank() == 0:
            torch.save(state, path)
        dist.barrier()

    def wait(self) -> None: ...


class LightningSave:
    """As Lightning's Trainer saves by default: its own writer in rank 0, then a barrier.

    `python -m tests.support.frameworks install` installs it.
    """

    def __init__(self) -> None:
        sys.path.append(str(frameworks.folder()))
        self._writer = import_module("lightning.pytorch.plugins.io").TorchCheckpointIO()

    def save(self, state: State, path: Path) -> None:
        if dist.get_rank() == 0:
            self._writer.save_checkpoint(state, str(path))
        dist.barrier()

    def wait(self) -> None: ...


class AsyncDcpSave:
    """torch.distributed.checkpoint's async_save: a copy at once, then a thread writes it on every rank."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        self._save: Future[Any] | None = None

    def save(self, state: State, path: Path) -> None:
        begun = dcp.async_save(state, checkpoint_id=path, process_group=self._group)
        assert isinstance(begun, Future)
        self._save = begun

    def wait(self) -> None:
        if self._save is not None:
            self._save.result()
            self._save = None


PEERS: dict[str, Callable[[], PeerSave]] = {
    "torch": TorchSave,
    "lightning": LightningSave,
    "dcp": AsyncDcpSave,
}
