"""Train a small GPT on text that ships with Python, on any number of ranks, and print what it writes.

    python examples/gpt/train.py                              # one process
    mpiddp launch -H localhost:2 examples/gpt/train.py        # two ranks
    torchrun --nproc-per-node 2 examples/gpt/train.py --text my.txt --out runs/mine
    mpirun -np 2 python -m mpiddp run examples/gpt/train.py

Run the same command again to resume, after a SIGTERM as well as after a crash: the training ends with the
same bits. examples/gpt/README.md has its curve and its figures.
"""

from __future__ import annotations

import argparse
import contextlib
import time

import torch
import torch.distributed as dist
from data import Text, batch_of_step, load_text, require_same_text, windows
from model import GPT, learning_rate, parameter_groups, sample, summed_loss
from options import parser, require_divisible, shape_of, whole
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import mpiddp
from mpiddp.train.muon import fast_dtype

LOG_EVERY = 20  # steps
EVALUATED_AT_ONCE = 32  # windows; a matter of memory and speed, not of the result
SAMPLED = 500  # characters
PRECISIONS = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}


def main() -> None:
    with mpiddp.process_group() as world:
        train(parse(), world)


def parse() -> argparse.Namespace:
    options = parser("Train a small GPT that continues a text character by character.", steps=600)
    add = options.add_argument
    add("--out", default="runs/gpt", metavar="DIR", help="folder of the run")
    add("--save-every", default="1m", metavar="T", help="200 (steps), 30s, 10m or 1h")
    add("--evaluate-every", type=whole(1), default=100, metavar="N", help="steps in between")
    add(
        "--precision", choices=("auto", *PRECISIONS), default="auto", help="of products of matrices"
    )
    return options.parse_args()


def train(options: argparse.Namespace, world: mpiddp.World) -> None:
    device, ranks = torch.device(world.device), world.world_size
    text = load_text(options.text, options.context)
    shape = shape_of(options, len(text.characters))
    require_divisible(options.batch_size, ranks, "ranks")
    require_same_text(text)

    torch.manual_seed(options.seed)
    net = GPT(shape).to(device)
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    groups = parameter_groups(net, decay=0.1)
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95), fused=True)
    precision = PRECISIONS.get(options.precision) or fastest_precision(device)
    scaler = torch.amp.GradScaler(device.type, enabled=precision is torch.float16)
    say(
        f"{sum(each.numel() for each in net.parameters()):,} parameters, {precision}, "
        f"{len(text.train):,} characters of {text.name}, {len(text.characters)} different ones"
    )

    checkpoints = open_run(options, text)
    mpiddp.announce(global_batch_size=options.batch_size, max_ranks=options.batch_size)
    if saved := checkpoints.resume():
        saved.load_into(model=net, optimizer=optimizer, scaler=scaler)
    started = time.perf_counter()
    for step in range(saved.step + 1 if saved else 1, options.steps + 1):
        lr = learning_rate(step, options.steps, options.lr)
        for group in optimizer.param_groups:
            group["lr"] = lr
        inputs, targets = (
            each[world.rank :: ranks].to(device)
            for each in batch_of_step(
                text.train, step, options.batch_size, options.context, options.seed
            )
        )
        with autocast(device, precision):
            logits = model(inputs)
        loss = summed_loss(logits.float(), targets) / targets.numel()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

        ends = step == options.steps
        if ends or step == 1 or step % LOG_EVERY == 0:
            losses, cpu_s = over_ranks(loss.item(), time.process_time(), device=device)
            record = {"loss": losses / ranks, "lr": lr, "cpu_s": cpu_s}
            if ends or step == 1 or step % options.evaluate_every == 0:
                record["validation_loss"] = validation_loss(
                    net, text.validation, options, precision
                )
            record["seconds"] = time.perf_counter() - started
            mpiddp.log_metrics(step, **record)
            say(f"step {step:5}  " + "  ".join(f"{name} {x:.4g}" for name, x in record.items()))
        if ends or checkpoints.due(step):
            states = {"model": net, "optimizer": optimizer, "scaler": scaler}
            checkpoints.save(step, {name: each.state_dict() for name, each in states.items()})
        if mpiddp.should_stop():
            return
    if world.rank == 0:  # no collective below: the other ranks wait for the end of the job
        start = text.validation[:1].to(device)
        drawn = sample(net, start, SAMPLED, options.context, torch.Generator().manual_seed(1))
        print(f"\n{text.decode(drawn)}", flush=True)


def open_run(options: argparse.Namespace, text: Text) -> mpiddp.Checkpoints:
    """The run's folder. A run that resumes must have the same text, and the same options but these."""
    free = ("text", "out", "save_every", "evaluate_every", "local_rank")
    config = {name: value for name, value in vars(options).items() if name not in free}
    config["text"] = text.digest
    try:
        return mpiddp.Checkpoints(options.out, every=options.save_every, config=config)
    except ValueError as error:
        raise mpiddp.UserError(f"--save-{error}.") from None  # "every: …"


@torch.no_grad()
def validation_loss(
    net: GPT, tokens: Tensor, options: argparse.Namespace, precision: torch.dtype
) -> float:
    """Nats per character over all windows of these tokens, side by side. A collective."""
    device = net.token.weight.device
    starts = torch.arange(0, len(tokens) - options.context, options.context)
    own = starts[dist.get_rank() :: dist.get_world_size()]
    nats = characters = 0.0
    for some in own.split(EVALUATED_AT_ONCE) if len(own) else ():
        inputs, targets = (each.to(device) for each in windows(tokens, some, options.context))
        with autocast(device, precision):
            logits = net(inputs)
        nats += summed_loss(logits.float(), targets).item()
        characters += targets.numel()
    nats, characters = over_ranks(nats, characters, device=device)
    return nats / characters


def fastest_precision(device: torch.device) -> torch.dtype:
    """bf16 where the hardware multiplies it, else fp32, or fp16 on a GPU."""
    dtype = fast_dtype(device)
    return torch.float16 if device.type == "cuda" and dtype is torch.float32 else dtype


def autocast(
    device: torch.device, precision: torch.dtype
) -> contextlib.AbstractContextManager[object]:
    if precision is torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=precision)


def over_ranks(*values: float, device: torch.device) -> list[float]:
    """The sums over all ranks. A collective."""
    sums = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    return sums.tolist()


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
