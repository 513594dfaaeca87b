"""Train the GPT of train.py divided among ranks, and compare it with the undivided one.

    mpiddp launch -H localhost:4 examples/gpt/sharded.py --tp 2 --compare    # 2 × data, 2 × tensor parallel
    mpiddp launch -H localhost:2 examples/gpt/sharded.py --fsdp --compare     # fully sharded data parallel
    mpiddp launch -H localhost:2 examples/gpt/sharded.py --pp 2 --compare    # a pipeline of two stages

The ranks that --tp and --pp leave over are data parallel. --tp goes with --pp and with --fsdp.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
from compare import TOLERANCE, Reference
from data import batch_of_step, load_text, require_same_text
from model import GPT, Shape, learning_rate, parameter_groups
from options import parser, require_divisible, shape_of, whole
from parallel import clip_gradients, divide, make_backward, sum_gradients, sum_table
from torch import nn

import mpiddp

HIGHEST_NORM = 1.0  # of the gradients
LOG_EVERY = 5  # steps


def main(arguments: Sequence[str] | None = None) -> None:
    with mpiddp.process_group() as world:
        if differences := train(parse(arguments), world):
            report(differences)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    options = parser("Train a small GPT that is divided among the ranks.", steps=10)
    add = options.add_argument
    add("--tp", type=whole(1), default=1, metavar="N", help="ranks that share heads and MLPs")
    add("--pp", type=whole(1), default=1, metavar="N", help="ranks that share the blocks")
    add("--fsdp", action="store_true", help="the data parallel ranks share the weights")
    add("--microbatches", type=whole(1), default=4, metavar="N", help="of a pipeline's step")
    add("--compare", action="store_true", help="train the undivided model too, and compare")
    return options.parse_args(arguments)


def train(options: argparse.Namespace, world: mpiddp.World) -> dict[str, float]:
    """Train all steps. Returns the largest differences to the undivided model, if it is to compare."""
    data_ranks = data_parallel_ranks(options, world.world_size)
    device = torch.device(world.device)
    text = load_text(options.text, options.context)
    shape = shape_of(options, len(text.characters))
    require_same_text(text)

    # Tensor parallel ranks exchange most: they are on one host.
    mesh = mpiddp.mesh(dp=data_ranks, tp=options.tp, pp=options.pp)
    stages = mesh.get_group("pp") if options.pp > 1 else None
    net = build(shape, options.seed, device)
    table = net.token.weight.shape
    part = divide(net, mesh, options)
    backward = make_backward(part, mesh, options)
    optimizer = build_optimizer(part)
    if options.compare:
        plain = build(shape, options.seed, device)
        reference = Reference(plain, build_optimizer(plain), net, part)
    say(f"{world.world_size} ranks: pp {options.pp} × dp {data_ranks} × tp {options.tp}")

    for step in range(1, options.steps + 1):
        lr = learning_rate(step, options.steps, options.lr)
        tokens, targets = (
            each.to(device)
            for each in batch_of_step(
                text.train, step, options.batch_size, options.context, options.seed
            )
        )
        own = slice(mesh.get_local_rank("dp"), None, data_ranks)
        loss = backward(tokens[own], targets[own])
        if stages is not None:
            sum_table(part, table, stages)
        if not options.fsdp:
            sum_gradients(part.parameters(), mesh.get_group("dp"))
        clip_gradients(part, HIGHEST_NORM, stages)
        # The sum over all windows: 0 on a rank without logits, the same on tensor parallel ranks.
        dist.all_reduce(loss)
        loss /= options.tp
        if options.compare:
            reference.step(tokens, targets, loss, lr, HIGHEST_NORM)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step in (1, options.steps) or step % LOG_EVERY == 0:
            say(f"step {step:4}  loss {loss.item():.6f}")
    return reference.result() if options.compare else {}


def data_parallel_ranks(options: argparse.Namespace, ranks: int) -> int:
    """Those that --tp and --pp leave. Raises UserError if ranks, model or batch cannot be divided."""
    tp, pp = options.tp, options.pp
    if options.fsdp and pp > 1:
        raise mpiddp.UserError(
            "--fsdp and --pp exclude each other in this example. Use one of them."
        )
    if ranks % (tp * pp):
        raise mpiddp.UserError(
            f"--tp {tp} × --pp {pp} needs a multiple of {tp * pp} ranks, and this job has {ranks}. "
            f"Start them: mpiddp launch -n {tp * pp} …"
        )
    if options.heads % tp:
        raise mpiddp.UserError(
            f"--heads {options.heads} cannot be divided by --tp {tp}, and a rank has whole heads. "
            f"Use --heads {tp * max(1, options.heads // tp)}, or another --tp."
        )
    if options.layers < pp:
        raise mpiddp.UserError(
            f"--layers {options.layers} is less than --pp {pp}, and a stage has a block at least. "
            f"Use --layers {pp} or more."
        )
    if options.microbatches < pp:
        raise mpiddp.UserError(
            f"--microbatches {options.microbatches} is less than --pp {pp}: stages would wait. "
            f"Use --microbatches {pp} or more."
        )
    data_ranks = ranks // (tp * pp)
    if pp > 1:
        parts = data_ranks * options.microbatches
        require_divisible(options.batch_size, parts, "microbatches of all data parallel ranks")
    require_divisible(options.batch_size, data_ranks, "data parallel ranks")
    return data_ranks


def build(shape: Shape, seed: int, device: torch.device) -> GPT:
    """The same weights on every rank."""
    torch.manual_seed(seed)
    return GPT(shape).to(device)


def build_optimizer(part: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameter_groups(part, decay=0.1), betas=(0.9, 0.95))


def report(differences: dict[str, float]) -> None:
    """Print the largest differences to the undivided model. Raises JobFailed if one is too large."""
    shown = ", ".join(f"{what} {difference:.1e}" for what, difference in differences.items())
    if not max(differences.values()) <= TOLERANCE:
        raise mpiddp.JobFailed(f"the divided model differs from the undivided one: {shown}.")
    say(f"largest relative differences to the undivided model: {shown}")


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
