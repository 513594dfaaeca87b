"""Compare the parameters and the optimizers of all ranks bit by bit: DDP keeps them equal.

    for step in range(1, STEPS + 1):
        train_one_step()
        if step % 100 == 0:
            mpiddp.check_divergence(model, optimizer, step=step)

A check gathers 32 bytes from each rank. Only if they differ do the ranks exchange the digest of each tensor.

`mpiddp.check_determinism` trains the first steps twice. A run leaves a digest of each tensor of a step, in the
order in which the step computes them. So the first one that differs is nearest to the cause.
"""

from __future__ import annotations

import functools
import gc
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import islice, zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from mpiddp.errors import JobFailed, UserError
from mpiddp.runtime.job.session import current
from mpiddp.runtime.reports import together
from mpiddp.text import all_of, listed
from mpiddp.world import World

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes
_MAX_NAMED = 4  # ranks in a sentence
_CHUNK = 1 << 20  # elements that are hashed at once
_FACTOR = -7046029254386353131  # 2^64 divided by the golden ratio, as a signed number
Training = tuple[nn.Module, torch.optim.Optimizer, Iterator[Tensor]]


def check_divergence(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Check that all ranks hold the same bits. A collective: every rank of the group must call it.

    It compares the parameters and the tensors of the optimizer's state. It leaves out buffers, because each
    rank has its own BatchNorm statistics, and, without `group`, shards: DTensors and the parameters of FSDP.

    Args:
        model: bare, or wrapped by DDP or torch.compile.
        optimizer: None compares the parameters alone.
        step: for the sentence of the error.
        group: the ranks to compare; by default all. Each of them must hold the same shards, which are
            compared as well: those along the dimension of a mesh that replicates.

    Raises:
        JobFailed: on all ranks of the group. It names the ranks whose bits differ from those of the majority,
            and the first tensor that differs. Without a majority, as with two ranks, it names all ranks.
            No rank of the group has its part of a save of `mpiddp.Checkpoints` in flight.
        UserError: several ranks have no process group; or all tensors are shards, and `group` is missing.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if World.from_env().world_size > 1:
            sentence = "mpiddp.check_divergence needs a process group of the ranks."
            raise UserError(
                sentence, fix="call torch.distributed.init_process_group or mpiddp.init before it"
            )
        return
    if dist.get_world_size(group) <= 1:  # -1 for a rank outside of the group
        return
    tensors = _compared_tensors(model, optimizer, with_shards=group is not None)
    if not tensors:
        raise UserError(
            "mpiddp.check_divergence: each rank has its own shard of every tensor, so there is nothing to compare.",
            fix="group=GROUP of the ranks that hold the same shards, or leave the call out",
        )
    digest_by_name = digests_of(tensors)
    device = next(iter(tensors.values())).device
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)  # all_gather_object copies to the current one
    of_all_tensors = sha256(repr(sorted(digest_by_name.items())).encode()).digest()
    if len(set(of_all_ranks(of_all_tensors, group))) == 1:
        return
    name = f"rank {dist.get_rank()} on {socket.gethostname()}"
    names, digests = zip(*of_all_ranks((name, digest_by_name), group), strict=True)
    current().progress.wait_for_saves()
    of_all_ranks(None, group)  # the first rank to exit ends the others
    at = "" if step is None else f"step {step}: "
    raise JobFailed(f"{at}the ranks have diverged: {differing_ranks(names, digests)}.")


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The digest of each tensor. This waits once for each GPU, and not once for each tensor."""
    digests: dict[str, int] = {}
    for device in {tensor.device for tensor in tensors.values()}:
        by_name = {
            name: digest(tensor) for name, tensor in tensors.items() if tensor.device == device
        }
        digests |= dict(zip(by_name, torch.stack([*by_name.values()]).tolist(), strict=True))
    return {name: digests[name] for name in tensors}


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """A hash of a tensor's bits and of their order: int64 [], on its device. Of a DTensor, that of its shard.

    It is the sum of the elements as integers mod 2^64, each times an odd number of its own place. So any
    change of one element changes it, and several changes, such as another order, cancel only by a chance of
    2^-63. Integers add up to the same sum in any order, so the hash does not depend on the device, on the
    number of threads, or on the layout of the tensor in memory.
    """
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.detach().resolve_neg().contiguous().reshape(-1)
    bits = flat.view(_INTEGERS[flat.element_size()])
    weights, total = _weights(bits.device), torch.zeros((), dtype=torch.int64, device=bits.device)
    for part in bits.split(_CHUNK):
        total = total * _FACTOR + (part * weights[: len(part)]).sum()
    return total


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """An odd number for each place of a chunk, mixed as splitmix64 mixes: int64 [_CHUNK], on the device."""
    mixed = torch.arange(1, _CHUNK + 1, device=device) * _FACTOR
    mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
    return (mixed ^ (mixed >> 27)) | 1


def differing_ranks(ranks: Sequence[str], digests: Sequence[Mapping[str, int]]) -> str:
    """The ranks that differ, by their names [N] and digests [N] by tensor, and the first tensor that does."""
    tensors = list(digests[0])
    for rank, by_name in zip(ranks, digests, strict=True):
        if other := set(tensors) ^ by_name.keys():
            return (
                f"{ranks[0]} and {rank} hold different tensors, such as {min(other)}. If the optimizer's "
                "state is sharded, check the model alone"
            )
    rows = [tuple(by_name[name] for name in tensors) for by_name in digests]
    usual, num_equal = Counter(rows).most_common(1)[0]
    has_majority = 2 * num_equal > len(rows)
    odd = [name for name, row in zip(ranks, rows, strict=True) if row != usual or not has_majority]
    names = all_of(odd) if len(odd) <= _MAX_NAMED else listed(odd, _MAX_NAMED)
    verb = "differs" if len(odd) == 1 else "differ"
    than = f" from the {num_equal} ranks that agree" if has_majority else ""
    differ = [name for name in tensors if len({by_name[name] for by_name in digests}) > 1]
    first, _, _ = differ[0].partition(": ")
    return f"{names} {verb}{than}, first in {first} ({len(differ)} of {len(tensors)} tensors)"


def _compared_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, *, with_shards: bool
) -> dict[str, Tensor]:
    """The parameters and the optimizer's state, by name, type and shape."""
    sharded: set[Tensor] = set()  # parameters in modules of FSDP, which are plain tensors
    # Not loaded: the model has no such module.
    if not with_shards and (fsdp := sys.modules.get("torch.distributed.fsdp")):
        for module in fsdp.FullyShardedDataParallel.fsdp_modules(model):
            sharded.update(module.parameters())
    names: dict[Tensor, str] = {}
    for name, tensor in model.named_parameters():  # DDP and torch.compile add to the names
        names[tensor] = name.replace("_orig_mod.", "").removeprefix("module.")
    # A name, a value, and the parameter that it belongs to.
    rows: list[tuple[str, Any, Tensor]] = [(name, tensor, tensor) for tensor, name in names.items()]
    for parameter, state in optimizer.state.items() if optimizer is not None else ():
        name = names.get(parameter, "a parameter of another model")
        for path, leaf in tree_flatten_with_path(state)[0]:
            key = keystr(path).strip("[']")
            rows.append((f"{key} of {name}", leaf, parameter))
    return {
        f"{name}: {value.dtype} {list(value.shape)}": value
        for name, value, parameter in rows
        if isinstance(value, Tensor) and parameter not in sharded
        if with_shards or not hasattr(value, "to_local")
    }


def of_all_ranks(value: object, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The values of all ranks of the group. A collective: each of them must call it."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def check_determinism(begin: Callable[[], Training], *, steps: int = 10) -> int:
    """Check that a training repeats itself bit for bit. A collective: every rank must call it.

        def begin():
            torch.manual_seed(0)
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            return model, optimizer, (train_one_step(model, optimizer, batch) for batch in batches(seed=0))

        mpiddp.check_determinism(begin)

    Args:
        begin: called twice. It returns a fresh model, its optimizer, and an iterator that makes a step and
            yields the step's loss, a scalar tensor.
        steps: to make in each run.

    Returns:
        The number of tensors that were compared in each step.

    Raises:
        JobFailed: on all ranks. It names the first step, the rank and the tensor that differ.
    """
    one = list(_digests(begin, steps))
    gc.collect()  # a model under DDP refers to itself, and its memory may be needed for the second run
    other = list(_digests(begin, steps))
    differing = {
        place: a or b for place, (a, b) in enumerate(zip_longest(one, other)) if a != b
    }  # one may end early
    first = min(differing, default=len(one))
    firsts, rank = (of_all_ranks(first), dist.get_rank()) if dist.is_initialized() else ([first], 0)
    tensors = sum(step == 1 for step, _, _ in one)
    world = World.from_env()
    with together():
        if differing and rank == firsts.index(min(firsts)):
            step, name, _ = differing[first]
            same_step = sum(row[0] == step for row in differing.values())
            share = f"{same_step} of {tensors} tensors of that step"
            raise JobFailed(
                f"two runs of {(one or other)[-1][0]} steps from the same start differ: first in step {step}, on rank "
                f"{rank} on {world.hostname}, in {name} ({share})."
            )
    return tensors


def _digests(begin: Callable[[], Training], steps: int) -> Iterator[tuple[int, str, int]]:
    """Train the first steps. The step, the name and the digest of each tensor, in their order."""
    model, optimizer, losses = begin()
    for step, loss in enumerate(islice(losses, steps), start=1):
        for name, tensor in _tensors(model, optimizer, loss):
            yield step, name, int(digest(tensor))


def _tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """What a step has computed, in that order."""
    yield "the loss", loss
    for name, buffer in model.named_buffers():
        yield f"the buffer {name}", buffer
    for name, parameter in reversed(list(model.named_parameters())):
        if parameter.grad is not None:
            yield f"the gradient of {name}", parameter.grad
    for name, parameter in model.named_parameters():
        yield f"the parameter {name}", parameter
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, Tensor):
                yield f"the {key} of {name}", value
