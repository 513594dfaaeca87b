"""What a checkpoint of a training run holds, and how all ranks come back to it.

    model.pt     the bare model's state_dict, BatchNorm statistics averaged: for anyone to load
    trainer.pt   optimizer and gradient scaler
    ranks.pt     each rank's RNG states and own BatchNorm statistics
    state.json   step, epoch, position in the epoch, the configuration

The learning rate and the order of the images are functions of step, epoch and position. Only rank 0
reads and writes, so the hosts need not share a file system.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpiddp import checkpoint_dir
from mpiddp.crew import Crew
from mpiddp.errors import UserError
from mpiddp.train.config import TrainConfig, differences
from mpiddp.train.engine import averaged_buffers


@dataclass(frozen=True)
class Progress:
    """How far the training is."""

    step: int = 0  # optimizer steps done
    epoch: int = 0  # epochs done
    position: int = 0  # images of the current epoch done


def save(
    root: Path,
    progress: Progress,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    config: TrainConfig,
) -> None:
    """Write the checkpoint of this step, on rank 0. A collective: every rank must call it.

    Raises:
        UserError: on rank 0, when the folder cannot be written; the older checkpoints are untouched.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ranks: list[Any] | None = [None] * world_size if rank == 0 else None
    dist.gather_object(_rank_state(model), ranks)

    def fill(folder: Path) -> None:
        torch.save(model.state_dict(), folder / "model.pt")
        trainer = {"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
        torch.save(trainer, folder / "trainer.pt")
        torch.save(ranks, folder / "ranks.pt")
        state = {"progress": asdict(progress), "config": config.as_json()}
        (folder / "state.json").write_text(json.dumps(state, indent=1))

    with averaged_buffers(model):
        if rank == 0:
            try:
                checkpoint_dir.write(root, progress.step, fill)
                checkpoint_dir.prune(root, max(2, config.keep))
            except OSError as error:
                raise UserError(
                    f"{root}: checkpoint of step {progress.step} cannot be written "
                    f"({error.strerror}). The older ones are kept."
                ) from None


def find(resume: str, root: Path, say: Callable[[str], None]) -> Path | None:
    """The checkpoint to go on from, chosen by --resume; None to start anew. Rank 0 alone calls this.

    Raises:
        UserError: --resume names what is no valid checkpoint, or `never` and there are some.
    """
    if resume == "never":
        if existing := checkpoint_dir.list_steps(root):
            raise UserError(
                f"{root} holds {existing[-1].name} and --resume never was given. "
                "Name another --out, or leave --resume away to go on from there."
            )
        return None
    if resume == "auto":
        found = checkpoint_dir.newest_valid(root, say)
        if found is None and checkpoint_dir.list_steps(root):
            raise UserError(f"{root}: no checkpoint in it is valid. Name another --out.")
        return found
    folder = Path(resume)
    for candidate in (folder, folder / "checkpoints"):  # a folder of checkpoints, or of a run
        if checkpoint_dir.list_steps(candidate):
            found = checkpoint_dir.newest_valid(candidate, say)
            if found is None:
                raise UserError(f"--resume {resume}: no checkpoint in it is valid.")
            return found
    try:
        checkpoint_dir.verify(folder)
    except checkpoint_dir.BrokenCheckpoint as error:
        raise UserError(f"--resume {resume}: {error}.") from None
    return folder


def read(folder: Path, config: TrainConfig) -> dict[str, Any]:
    """A verified checkpoint's contents, tensors on the CPU. Rank 0 alone calls this.

    Raises:
        UserError: it is not of this program, or of another configuration.
    """
    try:
        state = json.loads((folder / "state.json").read_text())
        contents = {
            name: torch.load(folder / f"{name}.pt", map_location="cpu", weights_only=True)
            for name in ("model", "trainer", "ranks")
        }
    except FileNotFoundError as error:
        missing = Path(error.filename).name
        raise UserError(
            f"{folder} is no checkpoint of mpiddp train: it has no {missing}."
        ) from None
    if different := differences(state["config"], config):
        raise UserError(
            f"{folder} is of another configuration: {'; '.join(different)}. "
            "Give the options it was made with, or name another --out."
        )
    return {"progress": Progress(**state["progress"]), **contents}


def resume(crew: Crew, config: TrainConfig, root: Path, say: Callable[[str], None]) -> Any:
    """What rank 0 finds, on every rank: the contents of a checkpoint, or None. A collective."""
    contents: list[Any] = [None]
    with crew.together():
        if crew.world.rank == 0:
            folder = find(config.resume, root, say)
            if folder is not None:
                contents = [read(folder, config)]
                progress = contents[0]["progress"]
                say(f"going on from {folder}: step {progress.step}, epoch {progress.epoch}")
    dist.broadcast_object_list(contents)
    return contents[0]


def restore_rank(model: nn.Module, states: list[dict[str, Any]]) -> None:
    """Give this rank its own RNG and BatchNorm statistics back, if the job is as large as it was.

    In a job of another size the averaged statistics stay, and the RNG as it was seeded.
    """
    if len(states) != dist.get_world_size():
        return
    state = states[dist.get_rank()]
    for buffer, saved in zip(model.buffers(), state["buffers"], strict=True):
        buffer.copy_(saved)
    torch.set_rng_state(state["cpu_rng"])
    if "device_rng" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["device_rng"])


def _rank_state(model: nn.Module) -> dict[str, Any]:
    state: dict[str, Tensor | list[Tensor]] = {
        "cpu_rng": torch.get_rng_state(),
        "buffers": [buffer.cpu() for buffer in model.buffers()],
    }
    if torch.cuda.is_available():
        state["device_rng"] = torch.cuda.get_rng_state()
    return state
