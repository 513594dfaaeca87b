"""What a checkpoint of a training run holds, and how all ranks come back to it.

    model.pt     the bare model's state_dict, BatchNorm statistics averaged: for anyone to load
    trainer.pt   optimizer and gradient scaler
    ranks.pt     each rank's RNG states and own BatchNorm statistics
    state.json   step, epoch, position in the epoch, the configuration, what the data set holds

The learning rate and the order of the images are functions of step, epoch and position. One rank
reads for all, so the hosts need not share a file system.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpiddp.checkpoints.directory import HashedFile
from mpiddp.checkpoints.tensor_file import Unreadable, load_tensors
from mpiddp.errors import UserError
from mpiddp.train.config import TrainConfig, differences

_TENSOR_FILES = ("model", "trainer", "ranks")


@dataclass(frozen=True)
class Progress:
    """How far the training is."""

    step: int = 0  # optimizer steps done
    epoch: int = 0  # epochs done
    position: int = 0  # images of the current epoch done


@dataclass(frozen=True)
class Saved:
    """The contents of a checkpoint, tensors on the CPU."""

    progress: Progress
    model: dict[str, Tensor]
    trainer: dict[str, Any]  # the state_dicts of "optimizer" and "scaler"
    ranks: list[dict[str, Any]]  # [world_size]


def write_files(
    folder: Path, progress: Progress, contents: Mapping[str, Any], config: TrainConfig, data: str
) -> dict[str, str]:
    """Write the files of a checkpoint and return their SHA-256, by name.

    Args:
        contents: "model", "trainer" and "ranks", as in `Saved`; tensors on the CPU.
        data: the contents of the data set, see `Data`.

    Raises:
        OSError: the disk is full, ….
    """
    hashes = {}
    for name in _TENSOR_FILES:
        file = HashedFile(folder / f"{name}.pt")
        torch.save(contents[name], file)  # type: ignore[arg-type]
        hashes[f"{name}.pt"] = file.close()
    state = {"progress": asdict(progress), "config": config.as_json(), "data": data}
    (folder / "state.json").write_text(json.dumps(state, indent=1))
    return hashes


def read(folder: Path, config: TrainConfig, data: str) -> Saved:
    """A verified checkpoint's contents.

    Raises:
        UserError: it is not of this program, or of another configuration, or of other data.
    """
    try:
        state = json.loads((folder / "state.json").read_bytes())
        different = differences(state["config"], config)
        progress = Progress(**state["progress"])
        saved_data = state.get("data", data)  # earlier versions did not note it
    except (OSError, ValueError, LookupError, TypeError):
        raise UserError(
            f"{folder} is no checkpoint of mpiddp train: its state.json is missing or another one's."
        ) from None
    if different:
        raise UserError(
            f"{folder} is of another configuration: {'; '.join(different)}. "
            "Give the options it was made with, or name another --out."
        )
    if saved_data != data:
        raise UserError(
            f"{folder} is of other data: {saved_data}, now {data}. Give the --data-dir it was made "
            f"with, or begin anew in another --out from its weights: --weights {folder / 'model.pt'}"
        )
    contents = {}
    for name in _TENSOR_FILES:
        try:
            contents[name] = load_tensors(folder / f"{name}.pt")
        except OSError as error:
            raise UserError(f"{folder}: {name}.pt cannot be read ({error.strerror}).") from None
        except Unreadable as error:
            raise UserError(f"{folder}: {name}.pt is none of mpiddp train: {error}.") from None
    return Saved(progress, **contents)


def broadcast(saved: Saved | None, holder: int) -> Saved | None:
    """What rank `holder` has, on every rank. A collective: every rank must call it."""
    box = [saved]
    dist.broadcast_object_list(box, holder)
    return box[0]


def restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load `state`, in the memory layout of the parameters: the saved run may have had another.

    The fused kernels read parameter and momentum side by side, as they lie in memory.
    """
    optimizer.load_state_dict(state)
    for parameter, held in optimizer.state.items():
        momentum = held.get("momentum_buffer")
        if momentum is not None:
            held["momentum_buffer"] = torch.empty_like(parameter).copy_(momentum)


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
    if "device_rng" in state and _is_on_gpu(model):
        torch.cuda.set_rng_state(state["device_rng"])


def rank_state(model: nn.Module) -> dict[str, Any]:
    """This rank's RNG and own BatchNorm statistics."""
    state: dict[str, Tensor | list[Tensor]] = {
        "cpu_rng": torch.get_rng_state(),
        "buffers": _on_host(list(model.buffers())),
    }
    if _is_on_gpu(model):
        state["device_rng"] = torch.cuda.get_rng_state()
    return state


def _is_on_gpu(model: nn.Module) -> bool:
    return next(model.parameters()).is_cuda


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies on the CPU, by one transfer for each dtype: every one of them waits for the device."""
    copies: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        flat = torch.cat([tensors[place].reshape(-1) for place in places]).cpu()
        sizes = [tensors[place].numel() for place in places]
        for place, values in zip(places, flat.split(sizes), strict=True):
            copies[place] = values.clone().view_as(tensors[place])
    return [copies[place] for place in range(len(tensors))]
