"""The contents of a training checkpoint, and how all ranks resume from it.

    model.pt     the bare model's state_dict with averaged BatchNorm statistics; any program can load it
    trainer.pt   optimizer and gradient scaler
    ranks.pt     each rank's RNG states and own BatchNorm statistics
    state.json   step, epoch, position in the epoch, configuration, contents of the data set

Of a sharded model, replicated.pt has what the first two hold without the shards, see
`mpiddp.checkpoints.shards`.

The learning rate and the order of the images are functions of step, epoch and position. One rank
reads the checkpoint for all ranks, so the hosts need no shared file system.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mpiddp.checkpoints.contents import read_state, read_tensors
from mpiddp.checkpoints.saved import Received, Saved
from mpiddp.checkpoints.shards.index import INDEX
from mpiddp.checkpoints.tensor_file import write_tensors
from mpiddp.errors import UserError
from mpiddp.runtime.log import log
from mpiddp.train.config import TrainConfig, changed_options

_PARTS = ("model", "trainer")
_REPLICATED = "replicated"


@dataclass(frozen=True)
class Progress:
    """How far the training has come."""

    step: int = 0  # optimizer steps done
    epoch: int = 0  # epochs done
    position: int = 0  # images of the current epoch done


@dataclass(frozen=True)
class Contents:
    """The part of a checkpoint that all ranks share, tensors on the CPU."""

    progress: Progress
    model: dict[str, Any]  # tensors; None in place of sharded ones
    trainer: dict[str, Any]  # the state_dicts of "optimizer" and "scaler"


def write_files(
    folder: Path, saved: Saved[Contents], config: TrainConfig, data: str
) -> dict[str, str]:
    """Write the files of a checkpoint and return their SHA-256, by name.

    Args:
        data: the contents of the data set, see `Data`.

    Raises:
        OSError: a file cannot be written, for example because the disk is full.
    """
    common = saved.common
    contents = {"model": common.model, "trainer": common.trainer}
    files = {_REPLICATED: contents} if saved.is_sharded else contents
    hashes = write_tensors(folder, {**files, "ranks": list(saved.ranks)})
    state = {"progress": asdict(common.progress), "config": config.as_json(), "data": data}
    (folder / "state.json").write_text(json.dumps(state, indent=1))
    return hashes


def read(folder: Path, config: TrainConfig, data: str) -> Saved[Contents]:
    """Read the contents of a verified checkpoint.

    Raises:
        UserError: another program wrote it, or it was made with another configuration or other data.
        JobFailed: a disk has failed.
    """
    state = _read_state(folder)
    changes = changed_options(state["config"], config)
    refused = [change for change in changes if change.refusal]
    saved_data = state.get("data", data)  # version 0.1.0 did not write it
    if refused:
        raise UserError(
            f"{folder} was made with other options: {'; '.join(map(str, refused))}. "
            "Use the same options, or start a new run from its weights: "
            f"--out OTHER --weights {folder / 'model.pt'}"
        )
    if changes:
        log.info(f"resuming with other options: {'; '.join(map(str, changes))}")
    if saved_data != data:
        raise UserError(
            f"{folder} was made with other data: {saved_data}; the data is now {data}. "
            "Use the same --data-dir, or start a new run from its weights: "
            f"--out OTHER --weights {folder / 'model.pt'}"
        )
    is_sharded = (folder / INDEX).exists()
    _check_parallel(folder, config, is_sharded=is_sharded)
    contents: dict[str, Any] = {}
    for name in (_REPLICATED, "ranks") if is_sharded else (*_PARTS, "ranks"):
        contents[name] = _load(folder, name)
    ranks, replicated = contents.pop("ranks"), contents.pop(_REPLICATED, {})
    contents.update({name: replicated[name] for name in _PARTS if is_sharded})
    return Saved(Contents(Progress(**state["progress"]), **contents), ranks, is_sharded)


def _check_parallel(folder: Path, config: TrainConfig, *, is_sharded: bool) -> None:
    """Raise UserError if the checkpoint is in the other form than the run's."""
    if is_sharded == (config.parallel != "ddp"):
        return
    found = "holds the shards of a model" if is_sharded else "holds a whole model"
    other = "--parallel fsdp" if is_sharded else "--parallel ddp"
    raise UserError(
        f"{folder} {found}, but this run has --parallel {config.parallel}. Use {other}, or convert it: "
        f"mpiddp checkpoints convert {folder} OUT. Then resume with --resume OUT and another --out."
    )


def _load(folder: Path, name: str) -> Any:
    """The contents of a file of tensors. Raises as `_read_state`."""
    contents = read_tensors(folder, f"{name}.pt", writer="mpiddp train")
    if not _IS_CONTENTS[name](contents):
        raise UserError(
            f"{folder}: {name}.pt was not written by mpiddp train: it has other contents."
        )
    return contents


def _read_state(folder: Path) -> dict[str, Any]:
    """The contents of state.json. Raises UserError if another program wrote it, JobFailed for a disk."""
    state = read_state(folder)
    try:
        progress = asdict(Progress(**state["progress"])).values()
        if isinstance(state["config"], dict) and all(
            type(each) is int and 0 <= each < 1 << 63 for each in progress
        ):
            return state
    except (LookupError, TypeError):
        pass
    raise UserError(
        f"{folder} is not a checkpoint of mpiddp train: its state.json is missing or foreign."
    )


def _is_state_dict(contents: object) -> bool:
    return isinstance(contents, dict) and all(
        isinstance(each, Tensor) for each in contents.values()
    )


def _is_replicated(contents: object) -> bool:
    if not isinstance(contents, dict) or not isinstance(contents.get("model"), dict):
        return False
    tensors = {name: each for name, each in contents["model"].items() if each is not None}
    return _is_state_dict(tensors) and _is_trainer(contents.get("trainer"))


def _is_trainer(contents: object) -> bool:
    return isinstance(contents, dict) and all(
        isinstance(contents.get(name), dict) for name in ("optimizer", "scaler")
    )


def _is_list_of_ranks(contents: object) -> bool:
    return isinstance(contents, list) and all(
        isinstance(rank, dict)
        and isinstance(rank.get("buffers"), list)
        and isinstance(rank.get("cpu_rng"), Tensor)
        for rank in contents
    )


_IS_CONTENTS: dict[str, Callable[[object], bool]] = {
    "model": _is_state_dict,
    "trainer": _is_trainer,
    "ranks": _is_list_of_ranks,
    _REPLICATED: _is_replicated,
}


def restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load `state`, with this run's settings, and the momentum in the memory layout of the parameters.

    The saved run may have had another --momentum or --weight-decay, and another layout. The fused kernels
    read a parameter and its momentum element by element in memory order.
    """
    settings = [{**group} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
    for parameter, held in optimizer.state.items():
        momentum = held.get("momentum_buffer")
        if momentum is not None:
            held["momentum_buffer"] = torch.empty_like(parameter).copy_(momentum)


def sharded_like(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[tuple[Any, ...]], Tensor | None]:
    """A function from the path of a tensor in `Contents` to a tensor that is sharded in the same way."""
    of_model = model.state_dict()
    parameters = [each for group in optimizer.param_groups for each in group["params"]]

    def like(path: tuple[Any, ...]) -> Tensor | None:
        match path:
            case ("model", str(name)):
                return of_model.get(name)
            case ("trainer", "optimizer", "state", int(index), _) if index < len(parameters):
                parameter: Tensor = parameters[index]
                return parameter
        return None

    return like


def restore_rank(model: nn.Module, received: Received[Contents], world_size: int) -> None:
    """Restore this rank's RNG and own BatchNorm statistics, if the job has as many ranks as before.

    A job of another size keeps the averaged statistics and the freshly seeded RNG.
    """
    state = received.own
    if state is None or received.world_size != world_size:
        return
    for buffer, saved in zip(model.buffers(), state["buffers"], strict=True):
        buffer.copy_(saved)
    torch.set_rng_state(state["cpu_rng"])
    device = _device_of(model)
    if "device_rng" in state and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state["device_rng"])


def rank_state(model: nn.Module) -> dict[str, Any]:
    """This rank's RNG and own BatchNorm statistics."""
    state: dict[str, Tensor | list[Tensor]] = {
        "cpu_rng": torch.get_rng_state(),
        "buffers": _on_host(list(model.buffers())),
    }
    device = _device_of(model)
    if device.type != "cpu":
        state["device_rng"] = torch.get_device_module(device).get_rng_state()
    return state


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy to the CPU with one transfer per dtype, because each transfer waits for the device."""
    copies: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        indices = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
        flat = torch.cat([tensors[index].reshape(-1) for index in indices]).cpu()
        sizes = [tensors[index].numel() for index in indices]
        for index, values in zip(indices, flat.split(sizes), strict=True):
            copies[index] = values.clone().view_as(tensors[index])
    return [copies[index] for index in range(len(tensors))]
