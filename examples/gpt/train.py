"""Train a small GPT on text that ships with Python, on any number of ranks, and print what it writes.

    python examples/gpt/train.py                                   # one process
    mpiddp launch -n 2 examples/gpt/train.py                       # a copy of the model on each rank
    mpiddp launch -n 4 examples/gpt/train.py --fsdp                # a part of each weight
    mpiddp launch -n 4 examples/gpt/train.py --tp 2                # 2 × data, 2 × tensor parallel
    mpiddp launch -n 4 examples/gpt/train.py --pp 2                # 2 × data, a pipeline of 2 stages

Run the same command again to resume, after a Ctrl-C as well as after a crash. A run may go on in another
form, but a pipeline only resumes a pipeline.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

import torch
import torch.distributed as dist
from model import GPT, Shape, learning_rate, parameter_groups, sample, summed_loss
from parallel import clip_gradients, divide, make_backward
from text import Text, load_text, windows
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.utils.data import DataLoader

import mpiddp

HIGHEST_NORM = 1.0  # of the gradients
LOG_EVERY = 20  # steps
EVALUATED_AT_ONCE = 32  # windows; a matter of memory and speed, not of the result
SAMPLED = 500  # characters
BY_NAME = StateDictOptions(
    flatten_optimizer_state_dict=True
)  # each stage has parameters of its own


class Parser(argparse.ArgumentParser):
    """Raises its errors, because argparse would print each of them once for each rank."""

    def error(self, message: str) -> NoReturn:
        raise mpiddp.UserError(f"{self.prog}: {message}. See: {self.prog} --help")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(description="Train a small GPT, character by character.", allow_abbrev=False)
    add = parser.add_argument
    add("--text", metavar="FILE", help="text in UTF-8 (default: the pages of Python's help)")
    add("--out", default="runs/gpt", metavar="DIR", help="folder of the run")
    add("--save-every", default="1m", metavar="T", help="200 (steps), 30s, 10m or 1h")
    add("--steps", type=int, default=600, help="steps of the training")
    add("--batch-size", type=int, default=16, help="windows of a step over all ranks")
    add("--context", type=int, default=128, help="characters of a window")
    add("--layers", type=int, default=3, help="blocks")
    add("--width", type=int, default=128, help="numbers for each character")
    add("--heads", type=int, default=4, help="attention heads of a block")
    add("--lr", type=float, default=4e-3, help="highest learning rate of AdamW")
    add("--seed", type=int, default=0, help="of the weights and the order of the windows")
    add("--evaluate-every", type=int, default=100, help="steps between two evaluations")
    add("--bf16", action="store_true", help="multiply matrices in bfloat16")
    add("--tp", type=int, default=1, help="ranks that share heads and MLPs")
    add("--pp", type=int, default=1, help="ranks that share the blocks")
    add("--fsdp", action="store_true", help="the data parallel ranks share the weights")
    add("--microbatches", type=int, default=4, help="of a pipeline's step")
    options = parser.parse_args(arguments)
    require(options.fsdp + (options.pp > 1) < 2, "--fsdp and --pp exclude each other here")
    require(options.width % (2 * options.heads) == 0, "--width must be a multiple of 2 × --heads")
    require(options.heads % options.tp == 0, "--heads must be a multiple of --tp")
    require(options.pp <= min(options.layers, options.microbatches), "--pp exceeds the blocks")
    return options


def require(is_right: bool, sentence: str) -> None:
    if not is_right:
        raise mpiddp.UserError(f"{sentence}.")


def main() -> None:
    with mpiddp.process_group() as world:
        train(parse(), world)


def train(options: argparse.Namespace, world: mpiddp.World) -> None:
    device = torch.device(world.device)
    text = load_text(options.text, options.context)
    options.vocabulary = len(text.characters)
    copies, rest = divmod(world.world_size, options.tp * options.pp)
    require(rest == 0, "the number of ranks must be a multiple of --tp × --pp")
    parts = copies * (options.microbatches if options.pp > 1 else 1)
    require(options.batch_size % parts == 0, f"--batch-size must be a multiple of {parts}")

    torch.manual_seed(options.seed)  # the same weights on every rank
    net = GPT(Shape(options.vocabulary, options.layers, options.width, options.heads)).to(device)
    # Tensor parallel ranks exchange most, so mpiddp.mesh requires them to be on one host.
    mesh = mpiddp.mesh(dp=copies, tp=options.tp, pp=options.pp)
    part = divide(net, mesh, options)
    backward = make_backward(part, mesh, options)
    groups = parameter_groups(part, decay=0.1)
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95))
    sampler = mpiddp.Sampler(
        len(text.train) - options.context,
        options.batch_size,
        seed=options.seed,
        rank=mesh.get_local_rank("dp"),
        world_size=copies,
    )
    # Without a generator of its own, a DataLoader draws from torch's, once more for each resume.
    loader = DataLoader(
        range(sampler.num_samples),
        batch_sampler=sampler,
        collate_fn=partial(batch, text, options),
        generator=torch.Generator(),
    )

    free = ("text", "out", "save_every", "evaluate_every", "tp", "pp", "fsdp", "microbatches")
    config = {name: value for name, value in vars(options).items() if name not in free}
    checkpoints = mpiddp.Checkpoints(options.out, every=options.save_every, config=config)
    step = 0
    if saved := checkpoints.resume():
        saved.load_into(model=part, optimizer=optimizer, sampler=sampler)
        step = saved.step
    while step < options.steps:
        for tokens, targets in sampler.batches(loader):
            step += 1
            lr = learning_rate(step, options.steps, options.lr)
            for group in optimizer.param_groups:
                group["lr"] = lr
            with torch.autocast(device.type, torch.bfloat16, enabled=options.bf16):
                loss = backward(tokens.to(device), targets.to(device))
            clip_gradients(part, HIGHEST_NORM, mesh.get_group("pp") if options.pp > 1 else None)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

            ends = step == options.steps
            evaluates = options.pp == 1 and (ends or step % options.evaluate_every == 0)
            if ends or evaluates or step == 1 or step % LOG_EVERY == 0:
                dist.all_reduce(
                    loss
                )  # the shares of all ranks; tensor parallel ranks have the same
                record = {"loss": loss.item() / options.tp, "lr": lr}
                if evaluates:
                    record["validation_loss"] = validation_loss(part, text, options, sampler)
                mpiddp.log_metrics(step, **record)
                if world.rank == 0:
                    numbers = "  ".join(f"{name} {value:.4g}" for name, value in record.items())
                    print(f"step {step:5}  {numbers}", flush=True)
            if ends or checkpoints.due(step):
                states = {"model": part.state_dict(), "sampler": sampler.state_dict()}
                states["optimizer"] = get_optimizer_state_dict(part, optimizer, options=BY_NAME)
                checkpoints.save(step, states)
            if mpiddp.should_stop():
                return
            if ends:
                break
    checkpoints.close()  # waits for the last save
    if world.rank == 0 and part is net and not options.fsdp and options.tp == 1:
        start = text.validation[:1].to(device)
        drawn = sample(net, start, SAMPLED, options.context, torch.Generator().manual_seed(1))
        print(f"\n{text.decode(drawn)}", flush=True)


def batch(text: Text, options: argparse.Namespace, starts: list[int]) -> tuple[Tensor, Tensor]:
    """The inputs and the targets of a rank in a step: int64 [windows, context] each."""
    return windows(text.train, torch.tensor(starts), options.context)


@torch.no_grad()
def validation_loss(
    part: torch.nn.Module, text: Text, options: argparse.Namespace, sampler: mpiddp.Sampler
) -> float:
    """Nats per character over the windows of the validation text, side by side. A collective.

    Each rank has as many windows, because each pass of a sharded model needs all ranks.
    """
    device = next(part.parameters()).device
    starts = torch.arange(0, len(text.validation) - options.context, options.context)
    count = len(starts) // sampler.world_size
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    for rows in starts[sampler.rank * count :][:count].split(EVALUATED_AT_ONCE):
        tokens, targets = (
            numbers.to(device) for numbers in windows(text.validation, rows, options.context)
        )
        with torch.autocast(device.type, torch.bfloat16, enabled=options.bf16):
            logits = part(tokens)
        totals[0] += summed_loss(logits.float(), targets)
        totals[1] += targets.numel()
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()


if __name__ == "__main__":
    main()
