"""Compare the parameters and the optimizers of all ranks bit by bit: DDP keeps them equal.

    for step in range(1, STEPS + 1):
        train_one_step()
        if step % 100 == 0:
            mpiddp.check_divergence(model, optimizer, step=step)

A check gathers 8 bytes from each rank. Only if they differ do the ranks exchange the digest of each tensor.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpiddp.errors import JobFailed, UserError
from mpiddp.runtime.job.session import current
from mpiddp.text import all_of, listed
from mpiddp.world import World

_HOST_BACKENDS = ("gloo", "mpi")  # their collectives take tensors of the CPU
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_MAX_NAMED = 4  # ranks in a sentence


def check_divergence(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Check that all ranks hold the same bits. A collective: every rank of the group must call it.

    Compared are the parameters, and the tensors of the optimizer's state. Left out are buffers, because
    each rank has its own statistics of BatchNorm, and without `group` shards: DTensors, and the parameters
    of FSDP.

    Args:
        model: bare, or wrapped by DDP or torch.compile.
        optimizer: None compares the parameters alone.
        step: for the sentence of the error.
        group: the ranks to compare; by default all. Each of them must hold the same shards, which are
            compared as well: those along the dimension of a mesh that replicates.

    Raises:
        JobFailed: on all ranks of the group. It names the ranks whose bits differ from those of the majority,
            and their first tensor that differs. Without a majority, as with two ranks, it names all ranks.
            No rank of the group has its part of a save of `mpiddp.Checkpoints` in flight.
        UserError: there are several ranks and no process group; or nothing but shards, and no `group`.
    """
    if sentence := find_divergence(model, optimizer, step=step, group=group):
        current().wait_for_saves()
        device = next(model.parameters()).device
        _all_gather(0, device, group)  # the first rank to exit ends the others
        raise JobFailed(f"{sentence}")


def find_divergence(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    step: int | None,
    group: dist.ProcessGroup | None = None,
) -> str:
    """The error of `check_divergence`, on all ranks of the group; "" if there is none."""
    if not _has_other_ranks(group):
        return ""
    tensors = _compared_tensors(model, optimizer, with_shards=group is not None)
    if not tensors:
        raise UserError(
            "mpiddp.check_divergence: each rank has its own shard of every tensor, so there is nothing to "
            "compare. Name the ranks that hold the same shards with group=, or leave the call "
            "out."
        )
    device = next(iter(tensors.values())).device
    digests = torch.stack([digest(each).to(device) for each in tensors.values()]).tolist()
    kinds = [f"{name} {each.dtype} {list(each.shape)}" for name, each in tensors.items()]
    if len(set(_all_gather(_number(kinds, digests), device, group))) == 1:
        return ""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)  # all_gather_object copies to the current one
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, (kinds, digests), group)
    ranks, kinds_of_ranks = _names(group), [kinds for kinds, _ in found]
    if len(set(map(tuple, kinds_of_ranks))) > 1:
        reason = _other_tensors(ranks, kinds_of_ranks)
    else:
        reason = differing_ranks(ranks, list(tensors), [digests for _, digests in found])
    return f"{'' if step is None else f'step {step}: '}the ranks have diverged: {reason}."


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """The sum of a tensor's elements as integers: int64 [], on its device. Of a DTensor, that of its shard.

    A flipped bit of an integer changes it by a power of 2 below 2^64, so it always changes the sum mod 2^64.
    Any other change of one integer does too. Several changes cancel only if they add up to 0, as those of two
    elements that have changed places do. Integers add up to the same sum in any order, so the digest does not
    depend on the device, on the number of threads, or on the layout of the tensor in memory.
    """
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(_INTEGERS[flat.element_size()]).sum(dtype=torch.int64)


def differing_ranks(
    ranks: Sequence[str], tensors: Sequence[str], digests: Sequence[Sequence[int]]
) -> str:
    """The ranks that differ, and their first tensor that does.

    Args:
        ranks: the names of N ranks.
        tensors: the names of T tensors.
        digests: of each rank and tensor: [N][T]. Not all ranks have the same.
    """
    usual = _majority([tuple(row) for row in digests])
    if usual is None:
        where = _where(tensors, [len(set(column)) > 1 for column in zip(*digests, strict=True)])
        return f"{_groups(ranks, [tuple(row) for row in digests])} differ, first in {where}"
    num_equal = sum(tuple(row) == usual for row in digests)
    odd = [
        f"{rank} differs from the {num_equal} ranks that agree, first in "
        + _where(tensors, [own != right for own, right in zip(row, usual, strict=True)])
        for rank, row in zip(ranks, digests, strict=True)
        if tuple(row) != usual
    ]
    return listed(odd, _MAX_NAMED)


def bare_names(names: Sequence[str]) -> list[str]:
    """The names of parameters without what DDP and torch.compile add to them, if they still differ."""
    bare = [name.replace("_orig_mod.", "") for name in names]
    if len(set(bare)) < len(bare):
        bare = list(names)
    if all(name.startswith("module.") for name in bare):  # or it may be a module of the user
        bare = [name.removeprefix("module.") for name in bare]
    return bare


def _where(tensors: Sequence[str], differs: Sequence[bool]) -> str:
    first = tensors[differs.index(True)]
    return f"{first} ({sum(differs)} of {len(tensors)} tensors)"


def _majority(values: Sequence[Hashable]) -> Any:
    """The value that more than half of the ranks have; None if there is none."""
    value, count = Counter(values).most_common(1)[0]
    return value if 2 * count > len(values) else None


def _groups(ranks: Sequence[str], values: Sequence[Hashable]) -> str:
    """The ranks by their values: "rank 0 and rank 1", "rank 0 = rank 1 and rank 2 = rank 3"."""
    groups: dict[Hashable, list[str]] = {}
    for rank, value in zip(ranks, values, strict=True):
        groups.setdefault(value, []).append(rank)
    names = [" = ".join(group) for group in groups.values()]
    return all_of(names) if len(ranks) <= _MAX_NAMED else listed(names, _MAX_NAMED)


def _other_tensors(ranks: Sequence[str], kinds: Sequence[Sequence[str]]) -> str:
    """The first difference of ranks that do not have the same tensors."""
    usual = _majority([tuple(each) for each in kinds]) or tuple(kinds[0])
    odd = next(index for index, each in enumerate(kinds) if tuple(each) != usual)
    missing = [kind for kind in usual if kind not in set(kinds[odd])]
    added = [kind for kind in kinds[odd] if kind not in set(usual)]
    if missing:
        what = f"lacks {missing[0]}"
    elif added:
        what = f"also has {added[0]}"
    else:
        what = "has its tensors in another order"
    return (
        f"{ranks[odd]} {what}, unlike other ranks. If the optimizer's state is sharded, check the model "
        "alone"
    )


def _has_other_ranks(group: dist.ProcessGroup | None) -> bool:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(group) > 1
    if World.from_env().world_size > 1:
        raise UserError(
            "mpiddp.check_divergence needs a process group of the ranks. Call "
            "torch.distributed.init_process_group or mpiddp.init before it."
        )
    return False


def _compared_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, *, with_shards: bool
) -> Mapping[str, Tensor]:
    """The parameters and the optimizer's state by name; without shards, only what this rank has whole."""
    sharded = set() if with_shards else _sharded_parameters(model)
    tensors: dict[str, Tensor] = {}
    names: dict[int, str] = {}
    parameters = dict(model.named_parameters())
    for name, parameter in zip(bare_names(list(parameters)), parameters.values(), strict=True):
        names[id(parameter)] = name
        if id(parameter) not in sharded:
            tensors[name] = parameter
    for number, group in enumerate(optimizer.param_groups if optimizer is not None else ()):
        for index, parameter in enumerate(group["params"]):
            if id(parameter) in sharded:
                continue
            name = names.get(id(parameter), f"parameter {index} of group {number}")
            state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
            for key, tensor in _tensors_of(state):
                tensors[f"{key} of {name}"] = tensor
    if with_shards:
        return tensors
    return {name: each for name, each in tensors.items() if not hasattr(each, "to_local")}


def _tensors_of(state: Any, key: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of nested dicts and lists, with the path of each: "momentum_buffer"."""
    if isinstance(state, Tensor):
        yield key, state
    elif isinstance(state, Mapping):
        for name in sorted(state, key=str):
            yield from _tensors_of(state[name], f"{key}.{name}" if key else str(name))
    elif isinstance(state, (list, tuple)):
        for index, each in enumerate(state):
            yield from _tensors_of(each, f"{key}[{index}]")


def _sharded_parameters(model: nn.Module) -> set[int]:
    """The ids of the parameters in modules of FSDP, which are plain tensors."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not loaded: the model has no such module
    if fsdp is None:
        return set()
    modules = (each for each in model.modules() if isinstance(each, fsdp.FullyShardedDataParallel))
    return {id(parameter) for module in modules for parameter in module.parameters()}


def _number(kinds: Sequence[str], digests: Sequence[int]) -> int:
    """64 bits for all tensors of a rank, which any difference changes."""
    text = "\n".join([*kinds, *map(str, digests)])
    return int.from_bytes(sha256(text.encode()).digest()[:8], "big", signed=True)


def _all_gather(number: int, device: torch.device, group: dist.ProcessGroup | None) -> list[int]:
    """The numbers of all ranks: [N]. Each is below 2^63 in size."""
    is_on_host = dist.get_backend(group) in _HOST_BACKENDS
    own = torch.tensor([number], device="cpu" if is_on_host else device)
    gathered = own.new_empty(dist.get_world_size(group))
    dist.all_gather(list(gathered.split(1)), own, group=group)
    numbers: list[int] = gathered.tolist()
    return numbers


def _names(group: dist.ProcessGroup | None) -> list[str]:
    """The ranks of the group, with their hosts if they have joined: "rank 2 on node1"."""
    coordinator = current().coordinator
    hosts = coordinator.hostnames if coordinator is not None else ()
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    return [
        f"rank {rank} on {hosts[rank]}" if rank < len(hosts) else f"rank {rank}" for rank in ranks
    ]
