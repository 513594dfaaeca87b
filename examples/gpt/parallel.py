"""Four ways to train a GPT on several ranks, and what its gradients then need: sums, one norm, one table.

    part = divide(net, mesh, options)                  # what this rank trains
    backward = make_backward(part, mesh, options)
    loss = backward(tokens, targets)                   # this rank's share; the gradients are in `part`

By default each rank has a copy, under DistributedDataParallel. With tensor parallelism a rank has some heads
and some units of each MLP. With FSDP it keeps a part of every weight, and gathers the weights of a block when
it uses them. In a pipeline it has some of the blocks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import GPT, summed_loss
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


def divide(net: GPT, mesh: DeviceMesh, options: argparse.Namespace) -> nn.Module:
    """What this rank trains of the model."""
    if options.tp > 1:
        tensor_parallel(net, mesh["tp"])
    if options.fsdp:
        fully_sharded(net, mesh["dp"])
    if options.pp > 1:
        return Stage(net, mesh.get_local_rank("pp"), options.pp)
    return net


def tensor_parallel(net: GPT, mesh: DeviceMesh) -> None:
    """Divide the heads and the MLPs' units. In place.

    A rank computes with its part up to `out` and `down`, whose outputs are summed over the ranks: two
    all-reduces for each block, and two in its backward pass. Shoeybi et al., 2019, arXiv:1909.08053.
    """
    plan = {
        "attention.qkv": ColwiseParallel(),
        "attention.out": RowwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(),
    }
    for block in net.blocks:
        parallelize_module(block, mesh, plan)


def fully_sharded(net: GPT, mesh: DeviceMesh) -> None:
    """Divide every weight, its gradient and its moments. In place. Gradients are averaged over the mesh."""
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)  # the rest: the table and the last norm


class Stage(nn.Module):
    """One of `count` parts of a GPT, as equal as they can be. The first reads tokens, the last has logits.

    Both of them use the table of the embedding, so each has its own copy: see `sum_table`. The parameters
    have the names of the undivided model, so a checkpoint of all stages is one of the whole model.
    """

    def __init__(self, net: GPT, index: int, count: int) -> None:
        super().__init__()
        self.is_first, self.is_last = index == 0, index == count - 1
        blocks = len(net.blocks)
        numbers = range(index * blocks // count, (index + 1) * blocks // count)
        self.blocks = nn.ModuleDict({str(number): net.blocks[number] for number in numbers})
        self.token = net.token if self.is_first or self.is_last else None
        self.norm = net.norm if self.is_last else None

    @property
    def table(self) -> Tensor | None:
        return None if self.token is None else self.token.weight

    def forward(self, x: Tensor) -> Tensor:
        """From tokens [B, T], or what the stage before has returned, to [B, T, width] or logits."""
        if self.is_first:
            x = self.token(x)
        for block in self.blocks.values():
            x = block(x)
        return F.linear(self.norm(x), self.table) if self.is_last else x


def make_backward(
    part: nn.Module, mesh: DeviceMesh, options: argparse.Namespace
) -> Callable[[Tensor, Tensor], Tensor]:
    """A function from this rank's tokens and targets to its share of the loss, which leaves gradients.

    The share is the sum over this rank's targets by the number of targets of all ranks. So the shares of all
    data parallel ranks add up to the loss, and their gradients to its gradient.
    """
    targets_of_step = options.batch_size * options.context
    replicates = options.tp == options.pp == 1 and not options.fsdp
    model = DistributedDataParallel(part, gradient_as_bucket_view=True) if replicates else part

    def share(logits: Tensor, targets: Tensor) -> Tensor:
        return summed_loss(logits, targets) / targets_of_step

    def in_one_stage(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = share(model(tokens), targets)
        if replicates or options.fsdp:  # both average the gradients
            (loss * mesh["dp"].size()).backward()
        else:
            loss.backward()
            sum_gradients(part.parameters(), mesh.get_group("dp"))
        return loss.detach()

    if not isinstance(part, Stage):
        return in_one_stage
    device = next(part.parameters()).device
    stages = mesh.get_group("pp")
    stage = PipelineStage(part, mesh.get_local_rank("pp"), options.pp, device, group=stages)
    schedule = Schedule1F1B(stage, options.microbatches, loss_fn=share, scale_grads=False)

    def in_a_pipeline(tokens: Tensor, targets: Tensor) -> Tensor:
        losses: list[Tensor] = []  # of the microbatches, on the last stage
        inputs = (tokens,) if part.is_first else ()
        schedule.step(*inputs, target=targets if part.is_last else None, losses=losses)
        sum_table(part, options, stages)
        sum_gradients(part.parameters(), mesh.get_group("dp"))
        return torch.stack(losses).sum().detach() if losses else torch.zeros((), device=device)

    return in_a_pipeline


def sum_table(stage: Stage, options: argparse.Namespace, group: dist.ProcessGroup) -> None:
    """Add the gradients of the first and the last stage's table, so that the two copies stay equal.

    This is a collective of all stages. The stages in between add zeros.
    """
    if stage.table is not None:
        gradient = stage.table.grad
    else:
        device = next(stage.parameters()).device
        gradient = torch.zeros(options.vocabulary, options.width, device=device)
    dist.all_reduce(gradient, group=group)


def sum_gradients(parameters: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Sum the gradients over the group in one message, each rank's own part of them if they are divided.

    DistributedDataParallel does the same, and overlaps it with the backward pass, but takes no DTensor.
    """
    gradients = [_local(weight.grad) for weight in parameters if weight.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, part in zip(gradients, flat.split(sizes), strict=True):
        gradient.copy_(part.view_as(gradient))


def clip_gradients(part: nn.Module, highest: float, stages: dist.ProcessGroup | None) -> None:
    """Scale the gradients of all ranks so that the norm of the whole is at most `highest`. A collective.

    clip_grad_norm_ takes either tensors or DTensors, and knows of one stage only. `stages` is the group of
    the stages if `part` is one of them.
    """
    is_copy = isinstance(part, Stage) and not part.is_first  # its table counts in the first stage
    counted = [weight for weight in part.parameters() if not (is_copy and weight is part.table)]
    square = torch.stack([_squared_norm(weight.grad) for weight in counted]).sum()
    if stages is not None:
        dist.all_reduce(square, group=stages)
    norm = square.sqrt().item()
    if norm > highest:
        for parameter in part.parameters():
            parameter.grad.mul_(highest / norm)


def _squared_norm(gradient: Tensor) -> Tensor:
    """Of the whole gradient: the sum over the ranks that have a part of it."""
    square = _local(gradient).square().sum()
    if isinstance(gradient, DTensor):
        for dimension, placement in enumerate(gradient.placements):
            if not placement.is_replicate():
                dist.all_reduce(square, group=gradient.device_mesh.get_group(dimension))
    return square


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
