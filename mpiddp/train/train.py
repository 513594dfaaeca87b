"""Train a ResNet on CIFAR-10, or on a folder of images. Copy this file to change it: a copy works as it is.

    mpiddp launch -n 2 -m mpiddp train --epochs 2 --out runs/a
    cp mpiddp/train/train.py mine.py && mpiddp launch -n 2 mine.py --epochs 2 --out runs/a

Read it from top to bottom: the options and their defaults, the run (`train`), a step, what depends on the
step alone, the score, checkpoints, the model and its optimizer, records. The images, the models, the
optimizer Muon and the sharding are modules of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import math
import os
import random
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import mpiddp
from mpiddp.train import data as datasets
from mpiddp.train.data import IGNORED, Batch, Data, Dataset
from mpiddp.train.muon import Muon, fast_dtype
from mpiddp.train.resnet import ARCHITECTURES, ARCHS, WhitenedResNet
from mpiddp.train.sharded import DTYPES, is_sharded, ranks_with_same_shards, shard

DONE, STOPPED = 0, 75  # exit codes
PREPARE_TIMEOUT_S = 1800.0  # the download of a data set over a slow connection
IMAGES_PER_PASS = 2  # the minimum that BatchNorm can normalize
REFERENCE_BATCH = 256  # images: the global batch of --lr (Goyal et al. 2017, section 2.1)
MAX_WARMUP_EPOCHS = 5
AVERAGE_EVERY = 32  # steps between two updates of the average, as in torchvision's references
BATCH_PIXELS = 500 * 32 * 32  # in a batch of an evaluation, if the training batch is smaller
WHITENING_IMAGES = 1000  # their patches stand for all patches of the data set
LARGE_IMAGE = 64  # pixels; CIFAR's stems are for smaller images
STARTUP_STEPS = 3  # slow because of page faults and kernel selection; left out of the speed
log = logging.getLogger("mpiddp.train")  # rank 0 prints it


# --- the options: each is one field, with its type, its default and its help ---


def count(low: int, metavar: str = "N") -> dict[str, Any]:
    """The keywords of an option that takes a whole number from `low` on."""

    def whole(text: str) -> int:
        if not re.fullmatch("[0-9]{1,12}", text, re.ASCII) or int(text) < low:
            raise argparse.ArgumentTypeError(
                f"expected a whole number, {low} or more, not {text[:80]!r}"
            )
        return int(text)

    return {"type": whole, "metavar": metavar}


def number(low: float, below: float = math.inf) -> Callable[[str], float]:
    """A parser for a number from `low` on."""
    limit = "" if below == math.inf else f" and less than {below:g}"

    def parsed(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value < below:
            raise argparse.ArgumentTypeError(
                f"expected a number of at least {low:g}{limit}, not {text[:80]!r}"
            )
        return value

    return parsed


def interval(text: str) -> str:
    """20 (steps), 30s, 10m or 1.5h: `mpiddp.Checkpoints` takes the text."""
    if not re.fullmatch(r"0*[1-9]\d{0,8}|(?=[0.]*[1-9])\d{1,6}(\.\d+)?[smh]", text, re.ASCII):
        raise argparse.ArgumentTypeError(
            f"expected steps, or a time such as 30s, 10m or 1h, not {text[:80]!r}"
        )
    return text


def path(text: str) -> str:
    """A path as written. An empty path usually comes from a shell variable that is not set."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, not an empty string")
    return text


def option(help: str, **keywords: Any) -> Any:
    """A field that is an option; `keywords` are argparse's. An option without a default may be None."""
    return field(metadata={"help": help, **keywords})


GROUPS = {  # of --help, by their first settings
    "arch": "model",
    "dataset": "data",
    "epochs": "schedule",
    "backend": "engine",
    "out": "run",
    "check_determinism": "checks",
}
COMMON = (  # of --help; --help-all has every option
    *("arch", "weights", "dataset", "data_dir", "use_syn", "batch_size", "global_batch_size"),
    *("epochs", "lr", "optimizer", "amp", "parallel", "out", "resume", "save_every"),
)
_POSITIVE, _FRACTION, _SWITCH = number(1e-12), number(0, 1), "store_true"
NAMES = tuple(ARCHS)


# fmt: off
@dataclass(frozen=True)
class Config:
    """The settings of a training, resolved. `mpiddp train --help-all` lists them; config.json has them."""

    max_shift: int  # CIFAR-10's images are shifted by up to so many pixels; this is no option
    low_res_epochs: int  # number of first epochs on smaller images; this is no option

    arch: str = option(f"{', '.join(NAMES)} (default: by the device)", choices=NAMES, metavar="ARCH")
    stem: str = option("first layers (default: auto)", choices=("auto", "imagenet", "cifar"), default="auto")
    weights: str | None = option("begin with the model of this checkpoint, or run", type=path, metavar="PATH")

    dataset: str = option("(default: cifar10)", choices=("cifar10", "image-folder"), default="cifar10")
    data_dir: str | None = option("(default: $MPIDDP_DATA, else ~/.cache/mpiddp)", type=path, metavar="DIR")
    use_syn: bool = option("random images and labels in the data set's shape", action=_SWITCH)
    image_size: int = option("pixels of an image folder's images (default: 224)", **count(1))
    num_workers: int = option("processes that decode, per rank (default: a rank's cores)", **count(0))
    skip_bad_images: bool = option("go on without images that cannot be read", action=_SWITCH)
    batch_size: int = option("images per rank and pass (default: 128 on CPUs, 256 on GPUs)", **count(1))
    global_batch_size: int = option("images per step over all ranks; or --batch-size", **count(1))
    grad_accum_steps: int = option("backward passes per step (default: 1)", **count(1), default=1)
    mixup: float = option("mix pairs of images, by a draw from Beta(A, A) (default: 0, off)",
                          type=_FRACTION, metavar="A", default=0.0)

    epochs: int = option("(default: 5 on CPUs, 12 on those with bf16, 30 on GPUs)", **count(1))
    steps_per_epoch: int | None = option("end every epoch after this many steps", **count(1))
    lr: float = option("peak; that of sgd is for 256 images, and scales with the batch (default: 0.4, of "
                       "whitened_resnet8 0.25, of adamw 1e-3)", type=_POSITIVE)
    schedule: str = option("learning rate (default: one-cycle)",
                           choices=("one-cycle", "cosine", "step", "constant"), default="one-cycle")
    optimizer: str = option("(default: muon for whitened_resnet8 on CPUs, else sgd)",
                            choices=("sgd", "adamw", "muon"))
    momentum: float = option("Nesterov's (default: 0.9)", type=_FRACTION, default=0.9)
    weight_decay: float = option("(default: 5e-4 for cifar10, 1e-4 for image folders)", type=_FRACTION)
    label_smoothing: float = option("of the training loss (default: 0, of whitened_resnet8 0.1)",
                                    type=_FRACTION)
    clip_grad_norm: float | None = option("limit of the gradients' norm", type=_POSITIVE, metavar="NORM")
    ema_decay: float | None = option("average the weights, and evaluate the average", type=_FRACTION)

    backend: str | None = option("(default: nccl with a GPU, else gloo)", choices=("nccl", "gloo"))
    amp: str = option("mixed precision (default: auto)",
                      choices=("auto", "bf16", "fp16", "off"), default="auto")
    parallel: str = option("copies or shards (default: ddp)", choices=("ddp", "fsdp", "hsdp"), default="ddp")
    sync_bn: bool = option("BatchNorm statistics over all ranks, on GPUs", action=_SWITCH)
    compile: str = option("(default: auto)", nargs="?", const="on",
                          choices=("auto", "on", "off"), default="auto")
    seed: int = option("of weights, order and augmentation (default: 0)", **count(0), default=0)
    deterministic: bool = option("deterministic kernels, on GPUs too", action=_SWITCH)

    out: str | None = option("folder of the run (default: runs/<time>-<arch>)", type=path, metavar="DIR")
    resume: str = option("auto: newest checkpoint in --out (default: auto)",
                         type=path, metavar="auto|PATH", default="auto")
    save_every: str | None = option("20, 30s or 10m (default: once an epoch)",
                                    type=interval, metavar="STEPS|TIME")
    keep: int = option("checkpoints to keep (default: 2)", **count(2), default=2)
    log_every: int = option("(default: 50)", **count(1, "STEPS"), default=50)
    stop_at_step: int | None = option("save after this step and exit with code 75", **count(1, "STEP"))

    check_determinism: int | None = option("compare two runs of 10 steps, or N",
                                           nargs="?", const=10, **count(1))
    check_divergence: int | None = option("how often to compare the ranks", **count(1, "STEPS"))
# fmt: on

    def image_side(self, epoch: int) -> int:
        """The height and width of an epoch's images, in pixels.

        The first two thirds of the low-resolution epochs have 1/2 of the size, the others 3/4: a model learns
        the same shapes in less time. Howard trained so for DAWNBench (fast.ai, 2018).
        """
        if epoch >= self.low_res_epochs:
            return self.image_size
        quarters = 2 if epoch < self.low_res_epochs * 2 / 3 else 3
        return max(1, self.image_size * quarters // 4)


# A resume may not change these options, because the steps of the checkpoint depend on them.
FIXED = (
    *("arch", "stem", "dataset", "use_syn", "image_size", "global_batch_size", "steps_per_epoch"),
    *("optimizer", "seed"),
)


class _Parser(argparse.ArgumentParser):
    """Raises its errors as UserError, because every rank parses the options."""

    def error(self, message: str) -> NoReturn:
        raise mpiddp.UserError(f"{self.prog}: {message}. See: {self.prog} --help")


def option_parser(*, shows_all: bool = True) -> argparse.ArgumentParser:
    """The parser of every option, with dashes. Its help has them all, or the common ones."""
    parser = _Parser(
        prog="mpiddp train",
        usage="%(prog)s [options]\n\n"
        "  mpiddp launch -n 2 -m mpiddp train --epochs 2 --out runs/a\n"
        "  mpiddp train --use-syn --arch resnet20 --steps-per-epoch 10",
        description="Train a ResNet, as one rank of a job or alone.",
        allow_abbrev=False,
    )
    parser.add_argument("--help-all", action="help", help="show every option, and exit")
    group = parser.add_argument_group("the most used options")
    for setting in dataclasses.fields(Config):
        if shows_all and setting.name in GROUPS:
            group = parser.add_argument_group(GROUPS[setting.name])
        if setting.metadata:
            added = group.add_argument(f"--{setting.name.replace('_', '-')}", **setting.metadata)
            if not shows_all and setting.name not in COMMON:
                added.help = argparse.SUPPRESS
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """The options that the user has set. All others have their default, or None. Raises UserError."""
    # --use_syn=1 becomes --use-syn=1; the value keeps its underscores.
    dashed = [re.sub("^--[^=]+", lambda name: name[0].replace("_", "-"), word) for word in argv]
    options = option_parser(shows_all="--help-all" in dashed).parse_args(dashed)
    sharded, is_sharded = f"--parallel {options.parallel}", options.parallel != "ddp"
    for first, second, are_given in (
        ("--batch-size", "--global-batch-size", options.batch_size and options.global_batch_size),
        ("--check-determinism", "--resume PATH", options.check_determinism and options.resume != "auto"),
        ("--compile", sharded, is_sharded and options.compile == "on"),
        ("--optimizer muon", sharded, is_sharded and options.optimizer == "muon"),
        ("--sync-bn", sharded, is_sharded and options.sync_bn),
        ("--check-divergence", sharded, options.parallel == "fsdp" and options.check_divergence),
    ):
        if are_given:
            raise mpiddp.UserError(f"{first} and {second} are mutually exclusive. Leave one out.")
    if options.image_size and options.dataset != "image-folder":
        raise mpiddp.UserError("--image-size applies to image folders only. Leave it out.")
    return options


def resolve(options: argparse.Namespace, world_size: int, device: torch.device) -> Config:
    """The configuration that these options of `parse` have here. Raises UserError if they cannot be met.

    A CPU without instructions for bf16 trains for fewer epochs, so both kinds of CPUs take less than four
    minutes: docs/evidence/accuracy.md.
    """
    chosen = {name: value for name, value in vars(options).items() if value not in (None, "auto")}
    on_cpu, is_ddp = device.type == "cpu", options.parallel == "ddp"
    is_folder = options.dataset == "image-folder"
    image_size = (options.image_size or 224) if is_folder else 32
    is_large = image_size >= LARGE_IMAGE
    amp = chosen.get("amp") or ("bf16" if fast_dtype(device) is torch.bfloat16 else "off")
    arch = options.arch or ("whitened_resnet8" if on_cpu and not is_folder else "resnet18")
    is_whitened = arch == "whitened_resnet8"
    if is_whitened and (is_folder or options.stem != "auto"):
        raise mpiddp.UserError(
            f"{arch} is for CIFAR-10, and has a stem of its own. Name another --arch, for example resnet18."
        )
    # A model that the user names is torchvision's, or of its paper. On GPUs, only the CIFAR stem leaves
    # enough of CIFAR-10's images: torchvision's halves them twice before the first block.
    stem = "cifar" if options.arch is None and not is_folder else ARCHITECTURES[arch].stem
    default_optimizer = "muon" if is_whitened and on_cpu and is_ddp and amp != "fp16" else "sgd"
    optimizer = options.optimizer or default_optimizer
    epochs = options.epochs or ((12 if amp == "bf16" else 5) if on_cpu else 30)
    ranks_on_host = mpiddp.World.from_env().local_world_size or 1
    by_default = {
        "arch": arch,
        "stem": "whitened" if is_whitened else "imagenet" if is_large else stem,
        "max_shift": 2 if on_cpu else 4,
        "image_size": image_size,
        "num_workers": max(1, len(os.sched_getaffinity(0)) // ranks_on_host),
        "epochs": epochs,
        "low_res_epochs": min(epochs - 1, round(0.75 * epochs)) if is_whitened and on_cpu else 0,
        "optimizer": optimizer,
        "lr": 1e-3 if optimizer == "adamw" else 0.25 if is_whitened else 0.4,
        "label_smoothing": 0.1 if is_whitened else 0.0,
        # For ImageNet, this is torchvision's; for CIFAR-10 and for AdamW, it is the usual value.
        "weight_decay": 0.05 if optimizer == "adamw" else 1e-4 if is_folder else 5e-4,
        "amp": amp,
        # Large images on a GPU are worth the minute that it takes.
        "compile": "on" if device.type == "cuda" and is_large and is_ddp else "off",
    }
    split = split_batch(options, mpiddp.announced(), world_size, 128 if on_cpu else 256)
    config = Config(**{**vars(options), **by_default, **chosen, **split})
    if config.sync_bn and on_cpu:
        raise mpiddp.UserError("--sync-bn needs GPUs: torch's SyncBatchNorm has no kernels for CPUs.")
    # A stem halves the sides of the images up to two times, and each group of blocks but the first once.
    depths = 4 if is_whitened else len(ARCHITECTURES[arch].depths) - 1
    halvings = depths + 2 * (config.stem == "imagenet")
    per_pass = config.batch_size * (world_size if config.sync_bn else 1)
    if per_pass == 1 and config.image_side(epoch=0) <= 1 << halvings:
        raise mpiddp.UserError(
            f"--batch-size 1 leaves BatchNorm one value: {arch} with the {config.stem} stem reduces such "
            "images to one pixel. Use 2 or more."
        )
    return config


def split_batch(
    options: argparse.Namespace, before: mpiddp.Announced | None, world_size: int, default: int
) -> dict[str, int]:
    """The images of a step over all ranks, the passes of a step, and the images of a rank's largest pass.

    If an earlier attempt (`before`) had another number of ranks, the global batch stays. The number of passes
    grows until no pass is larger than before, because each rank has the same memory as before. A pass becomes
    larger only if it would have a single image, which BatchNorm cannot normalize.
    """
    passes, images = options.grad_accum_steps, options.global_batch_size
    if before is not None and before.world_size != world_size:
        images = before.global_batch_size
        per_pass = -(-images // (passes * before.world_size))
        needed = -(-images // (per_pass * world_size))
        passes = max(1, min(needed, images // (IMAGES_PER_PASS * world_size)))
    parts = passes * world_size
    if images is None:
        images = (options.batch_size or default) * parts
    elif images < parts * (1 if images % parts == 0 else 2):
        raise mpiddp.UserError(
            f"--global-batch-size {images} gives some of {world_size} ranks fewer than two images per pass; "
            f"BatchNorm needs two. Use {IMAGES_PER_PASS * parts} or more."
        )
    return {
        "global_batch_size": images,
        "grad_accum_steps": passes,
        "batch_size": -(-images // parts),
    }


# --- the run ---


@dataclass(frozen=True)
class State:
    """The state of a training: its settings, its data, and everything that a step changes."""

    config: Config
    data: Data
    sampler: mpiddp.Sampler
    model: nn.Module  # without any wrapper
    ddp: nn.Module  # a step calls this module
    scored: nn.Module  # an evaluation calls this module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler  # passes gradients through unscaled, unless --amp is fp16
    average: dict[str, Tensor]  # the average of the model's state_dict, with --ema-decay


@dataclass(frozen=True)
class Step:
    """A step that was made."""

    number: int  # from 1 on, over all epochs
    epoch: int  # from 0 on
    lr: float
    loss_sum: Tensor  # of this rank's images: a scalar on the device
    ends_epoch: bool
    is_last: bool  # of the training


@dataclass(frozen=True)
class Score:
    """The score of the model, or of its average with --ema-decay, on all images for testing."""

    accuracy: float  # the fraction of images that it classifies
    loss: float  # the mean cross-entropy


def main(argv: list[str] | None = None) -> int:
    """Train as one rank of a job, or alone. Returns the exit code: DONE, or STOPPED on request."""
    options = parse(sys.argv[1:] if argv is None else argv)
    with mpiddp.process_group(backend=options.backend) as world:
        device = torch.device(str(world.device))
        # A check may fail on some ranks: then all ranks refuse, before anything is written.
        with mpiddp.together(timeout_s=PREPARE_TIMEOUT_S):
            config = resolve(options, world.world_size, device)
            needs_files = config.dataset == "cifar10" and not config.use_syn
            if needs_files and world.local_rank == 0 and not datasets.find_cifar10(data_dir(config)):
                datasets.fetch_cifar10(data_dir(config), partial(print, flush=True))
        with mpiddp.together():
            data = open_data(config, device, world.rank)
            sampler = build_sampler(config, data)
            choose_kernels(config)
            begin = partial(build_state, config, data, sampler, world, device)
        started = gathered(time.strftime("%Y%m%d-%H%M%S"))[0]
        out = Path(config.out or Path("runs") / f"{started}-{config.arch}")
        with mpiddp.together():
            check_ranks(config, data, world)
        if config.check_determinism:
            number_of_tensors = mpiddp.check_determinism(
                partial(first_steps, begin), steps=config.check_determinism
            )
            log.info(
                f"two runs of {config.check_determinism} steps from the same start are equal bit for bit on "
                f"{counted(world.world_size, 'rank')}, in each of {number_of_tensors} tensors of a step."
            )
            return DONE
        try:
            return train(begin(), world, out)
        except torch.OutOfMemoryError as error:
            raise mpiddp.JobFailed(out_of_memory(error, options, config)) from error


def train(state: State, world: mpiddp.World, out: Path) -> int:
    """Train to the end, or until a stop is requested, and save the last step. Returns the exit code."""
    config, data = state.config, state.data
    mpiddp.announce(  # what the launcher needs to restart this run, on fewer hosts too
        resume_args=resume_args(config, out),
        global_batch_size=config.global_batch_size,
        max_ranks=max(world.world_size, config.global_batch_size // IMAGES_PER_PASS),
    )
    with open_checkpoints(out, config, data, world) as checkpoints:
        with mpiddp.together():
            step = resume(state, checkpoints)
        if checkpoints.is_writer:
            save_json(out / "config.json", vars(config))
        records = Records(state, world, step)
        score: Score | None = None
        for made in steps(state, step):
            step = made.number
            # due() comes before should_stop(), because it is true at a stop, too: so a stop makes one save.
            is_due = checkpoints.due(step) or (config.save_every is None and made.ends_epoch)
            stops = not made.is_last and (mpiddp.should_stop() or step == config.stop_at_step)
            saves = is_due or stops or made.is_last
            records.add(made)
            with records.paused():
                if config.check_divergence and (saves or step % config.check_divergence == 0):
                    check_divergence(state, step)
                if saves:  # before the evaluation: if a stop or a crash ends that, no step is lost
                    save(state, checkpoints, step)
                if made.ends_epoch and data.test is not None and is_evaluated(made.epoch, config):
                    score = evaluate(state, data.test)
                    records.add_score(made, score)
                if stops:
                    checkpoints.close()  # waits for the save
                    arguments = shlex.join(resume_args(config, out))
                    command = f"the same command{' with ' if arguments else ''}{arguments}"
                    log.info(f"stopped at step {step}. To resume, run {command}.")
                    return STOPPED
        checkpoints.close()  # waits for the last save
        if score is None and data.test is not None:  # resumed after the last step
            score = evaluate(state, data.test)
        records.end(step, score)
    return DONE


def steps(state: State, step: int) -> Iterator[Step]:
    """Make the steps after `step`, one for each iteration, to the end of the last epoch."""
    config, length = state.config, state.sampler.steps_per_epoch
    for epoch in range(step // length, config.epochs):
        indices = state.sampler.indices(epoch, first=step % length)
        batches = images_of(state, [numbers for of_step in indices for numbers in of_step], epoch)
        while step < (epoch + 1) * length:
            lr = learning_rate(step, length, config)
            for group in state.optimizer.param_groups:
                group["lr"] = lr
            loss_sum = backward(state, batches, step)
            if config.clip_grad_norm is not None:  # torch takes the norm over all shards
                state.scaler.unscale_(state.optimizer)
                clip_grad_norm_(state.model.parameters(), config.clip_grad_norm)
            state.scaler.step(state.optimizer)
            state.scaler.update()
            if state.average and step % AVERAGE_EVERY == 0:
                update_average(state, average_weight(step + 1, length, config))
            step += 1
            ends_epoch, is_last = step % length == 0, step == length * config.epochs
            yield Step(step, epoch, lr, loss_sum, ends_epoch, is_last)


def images_of(state: State, indices: list[Tensor], epoch: int) -> Iterator[Batch]:
    """The images of an epoch, on the device: a batch for each backward pass."""
    side = state.config.image_side(epoch)
    for images, labels in state.data.train.batches(indices, epoch=epoch):
        resized = images if side == images.shape[-1] else F.adaptive_avg_pool2d(images, side)
        yield resized, labels


def backward(state: State, batches: Iterator[Batch], step: int) -> Tensor:
    """Compute the gradients of the mean loss over the step's global batch, equal on every rank.

    Returns the sum of the losses of this rank's images: a scalar on the device.
    """
    config = state.config
    state.optimizer.zero_grad()
    loss_sum = torch.zeros((), device=state.data.train.device)
    # The ranks take the mean of their gradients; the weight makes it the mean over all images.
    weight = dist.get_world_size() / config.global_batch_size
    for left in reversed(range(config.grad_accum_steps)):
        images, labels = next(batches)
        with reducing(state.ddp, left == 0):
            with autocast(config, images.device):
                loss = loss_of(state, images, labels, step)
            state.scaler.scale(loss * weight).backward()
        loss_sum += loss.detach()
    return loss_sum


def loss_of(state: State, images: Tensor, labels: Tensor, step: int) -> Tensor:
    """The sum of the losses of these images, float [N, 3, H, W], and labels, int64 [N] or IGNORED: a scalar.

    With --mixup, each image is mixed with its neighbour in the batch, and so is the loss: Zhang et al.,
    "mixup" (2017), as in torchvision's references. All ranks mix by the same draw, which depends on the step.
    """
    config = state.config
    loss = partial(F.cross_entropy, reduction="sum", label_smoothing=config.label_smoothing)
    if not config.mixup:
        return loss(state.ddp(images), labels)
    part = random.Random(f"{config.seed}/{step}").betavariate(config.mixup, config.mixup)
    logits = state.ddp(part * images + (1 - part) * images.roll(1, 0))
    return part * loss(logits, labels) + (1 - part) * loss(logits, labels.roll(1, 0))


def reducing(model: nn.Module, reduces: bool) -> contextlib.AbstractContextManager[None]:
    """The context of a forward and a backward pass, which reduces the gradients over the ranks or not."""
    if is_sharded(model):
        model.set_requires_gradient_sync(reduces)  # type: ignore[operator]
        model.set_is_last_backward(reduces)  # type: ignore[operator]
    elif not reduces and dist.get_world_size() > 1:
        return model.no_sync()  # type: ignore[operator, no-any-return]
    return contextlib.nullcontext()


def autocast(config: Config, device: torch.device) -> torch.autocast:
    """The autocast of --amp. A sharded model has its own policy instead, see `mpiddp.train.sharded`."""
    enabled = config.amp != "off" and config.parallel == "ddp"
    return torch.autocast(device.type, dtype=DTYPES.get(config.amp), enabled=enabled)


# --- values that depend on the step alone, so that no checkpoint contains them ---


def learning_rate(step: int, steps_per_epoch: int, config: Config) -> float:
    """The learning rate of a step, from 0 on.

    For SGD, it scales with the batch (Goyal et al. 2017). It rises linearly in a quarter of the epochs, at
    most 5. Then "one-cycle" falls linearly to zero (Smith & Topin 2017, without the short last phase),
    "cosine" falls to zero along half a cosine (Loshchilov & Hutter 2016), "step" divides by 10 at 1/2, 3/4
    and 7/8 of the remaining steps, and "constant" stays.
    """
    peak = config.lr
    if config.optimizer == "sgd":
        peak *= config.global_batch_size / REFERENCE_BATCH
    warmup = warmup_steps(steps_per_epoch, config)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps_per_epoch * config.epochs - warmup)
    if config.schedule == "one-cycle":
        return peak * (1 - progress)
    if config.schedule == "cosine":
        return peak * (1 + math.cos(math.pi * progress)) / 2
    if config.schedule == "step":
        return float(peak * 0.1 ** sum(progress >= mark for mark in (1 / 2, 3 / 4, 7 / 8)))
    return peak


def warmup_steps(steps_per_epoch: int, config: Config) -> int:
    """The number of steps in which the learning rate rises."""
    return round(steps_per_epoch * min(MAX_WARMUP_EPOCHS, config.epochs / 4))


def average_weight(step: int, steps_per_epoch: int, config: Config) -> float:
    """The weight of the model after this step in its average.

    As in torchvision's references: 1 in the warm-up, and afterwards --ema-decay is for one image between
    two updates of a training of one epoch. So the same value suits any batch, and any number of epochs.
    """
    if config.ema_decay is None or step <= warmup_steps(steps_per_epoch, config):
        return 1.0
    images = config.global_batch_size * AVERAGE_EVERY
    return min(1.0, (1 - config.ema_decay) * images / config.epochs)


@torch.no_grad()
def update_average(state: State, weight: float) -> None:
    """Move the average by this part of its distance to the model; with 1 it becomes the model."""
    for name, value in state.model.state_dict().items():
        average = state.average[name]
        if average.is_floating_point():
            average.lerp_(value, weight)
        else:  # BatchNorm's count of batches
            average.copy_(value)


# --- the score ---


def is_evaluated(epoch: int, config: Config) -> bool:
    """Whether the model is scored after this epoch: at the end, and once it trains on whole images."""
    return epoch >= config.low_res_epochs or epoch == config.epochs - 1


@torch.no_grad()
def evaluate(state: State, dataset: Dataset) -> Score:
    """Score the model, or its average, on all images of the data set. A collective: every rank must call it.

    Each image counts on exactly one rank, and the ranks add sums, not means. The batch size does not change
    the result, because BatchNorm uses its running statistics. All ranks have as many batches, of one size:
    each pass of a sharded model needs all ranks, and a compiled one is compiled for each size.
    """
    config, model = state.config, state.model
    rank, world_size = dist.get_rank(), dist.get_world_size()
    share = math.ceil(dataset.num_images / world_size)
    num_batches = math.ceil(share / max(config.batch_size, BATCH_PIXELS // config.image_size**2))
    size = math.ceil(share / num_batches)
    first, end = (dataset.num_images * part // world_size for part in (rank, rank + 1))
    numbers = torch.arange(first, first + num_batches * size)
    # Images beyond the share fill the last batch, and do not count.
    beyond = (numbers >= end).to(dataset.device).split(size)
    numbers = numbers.clamp(max=dataset.num_images - 1)
    totals = torch.zeros(3, dtype=torch.float64, device=dataset.device)  # correct, loss, images
    with scored_weights(state), autocast(config, dataset.device):
        batches = dataset.batches(numbers.split(size), epoch=0)
        for (images, labels), is_beyond in zip(batches, beyond, strict=True):
            labels = labels.masked_fill(is_beyond, IGNORED)
            logits = state.scored(images)
            totals[0] += (logits.argmax(1) == labels).sum()
            totals[1] += F.cross_entropy(logits.float(), labels, reduction="sum")
            totals[2] += (labels != IGNORED).sum()
    for module in model.modules():
        if is_sharded(module):  # free the parameters that only a backward pass would free
            module.reshard()  # type: ignore[operator]
    dist.all_reduce(totals)
    return Score(*(totals[:2] / totals[2]).tolist())


@contextlib.contextmanager
def scored_weights(state: State) -> Iterator[None]:
    """In the body, the model has the statistics of all ranks, and its average, if any. A collective."""
    model = state.model
    changed = state.average or statistics_of(model)
    before = {name: model.state_dict()[name].clone() for name in changed}
    model.load_state_dict(with_mean_statistics(changed, model), strict=False)
    model.eval()
    try:
        yield
    finally:
        model.train()
        model.load_state_dict(before, strict=False)


def statistics_of(model: nn.Module) -> dict[str, Tensor]:
    """BatchNorm's running statistics. Each rank has its own, from its own images."""
    return {name: value for name, value in model.named_buffers() if value.is_floating_point()}


def with_mean_statistics(values: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The values of a state_dict, with the mean of all ranks for BatchNorm's statistics. A collective.

    A step computes with the statistics of its own images, so only an evaluation and a checkpoint need this.
    """
    statistics = {name: values[name] for name in statistics_of(model)}
    if not statistics or dist.get_world_size() == 1:
        return dict(values)
    total = torch.cat([value.reshape(-1) for value in statistics.values()])
    dist.all_reduce(total)
    means = (total / dist.get_world_size()).split([value.numel() for value in statistics.values()])
    shaped = (mean.view_as(value) for mean, value in zip(means, statistics.values(), strict=True))
    return {**values, **dict(zip(statistics, shaped, strict=True))}


# --- checkpoints ---


def open_checkpoints(
    out: Path, config: Config, data: Data, world: mpiddp.World
) -> mpiddp.Checkpoints:
    """The checkpoints of the run in `out`. They refuse a resume with other FIXED options or data."""
    with mpiddp.together():
        contents = data_of_run(out, config, data) if world.rank == 0 else ""
    fixed = {f"--{name.replace('_', '-')}": getattr(config, name) for name in FIXED}
    settings = {"program": "mpiddp train", "data": gathered(contents)[0], **fixed}
    return mpiddp.Checkpoints(
        out,
        keep=config.keep,
        every=config.save_every,
        config=settings,
        not_finite=("train_loss",),
    )


def data_of_run(out: Path, config: Config, data: Data) -> str:
    """The data that the run began with, because --skip-bad-images lets images be removed. For rank 0."""
    for folder in (out, Path(config.resume)) if config.skip_bad_images else ():
        try:
            before = str(mpiddp.load(folder).config["data"])
        except (mpiddp.UserError, KeyError):  # there is no checkpoint, or Checkpoints will refuse it
            continue
        if before != data.contents:
            log.info(
                f"the run began with other data: {before}, now {data.contents}. The images come in another "
                "order from here on."
            )
        return before
    return data.contents


def save(state: State, checkpoints: mpiddp.Checkpoints, step: int) -> None:
    """Start to save the checkpoint of this step. A collective: every rank must call it.

    Any program can load the model, because it is the bare one. The learning rate and the order of the images
    are functions of the step.
    """
    model = state.model
    entries = {
        "model": with_mean_statistics(model.state_dict(), model),
        "optimizer": state.optimizer.state_dict(),
        "scaler": state.scaler.state_dict(),
    }
    per_rank = {"model": statistics_of(model)}
    if state.average:
        entries["ema"] = with_mean_statistics(state.average, model)
        per_rank["ema"] = {name: state.average[name] for name in statistics_of(model)}
    checkpoints.save(step, entries, per_rank=per_rank)


def resume(state: State, checkpoints: mpiddp.Checkpoints) -> int:
    """Restore the newest checkpoint, and return the number of steps that it has made; 0 without one.

    A job with another number of ranks has freshly seeded generators.
    """
    config = state.config
    saved = checkpoints.resume(None if config.resume == "auto" else config.resume)
    if saved is not None:
        load(state, saved)
    elif config.weights:
        load_weights(state)
    if saved is None or saved.world_size != dist.get_world_size():
        seed = config.seed + 1 + dist.get_rank()
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % (1 << 32))  # numpy's largest
    return saved.step if saved else 0


@torch.no_grad()
def load(state: State, saved: mpiddp.Resumed) -> None:
    """Load the model, the optimizer and the scaler, with the settings of this version of the program.

    If the saved run had no average, it begins as a copy of the model.
    """
    model, optimizer = state.model, state.optimizer
    settings = [{**group} for group in optimizer.param_groups]
    if state.average:  # through the model, which knows its shards
        if "ema" in saved.state:
            saved.load_into(ema=model)
        else:
            saved.load_into(model=model)
        update_average(state, weight=1.0)
    saved.load_into(model=model, optimizer=optimizer)
    for group, setting in zip(optimizer.param_groups, settings, strict=True):
        group.update(setting)
    if saved.world_size == dist.get_world_size():
        for name, value in saved.per_rank.get("model", {}).items():
            model.get_buffer(name).copy_(value)
        for name, value in saved.per_rank.get("ema", {}).items() if state.average else ():
            state.average[name].copy_(value)
    if saved.state["scaler"]:  # empty unless the saved run had --amp fp16
        state.scaler.load_state_dict(saved.state["scaler"])


def load_weights(state: State) -> None:
    """Begin with the model of --weights, without its last layer if that has another number of classes."""
    weights, model = state.config.weights, state.model
    saved = mpiddp.load(str(weights))
    if saved.state["model"].keys() != model.state_dict().keys():
        raise mpiddp.UserError(
            f"--weights {weights}: it is of another model than --arch {state.config.arch}."
        )
    saved.load_into(strict=False, model=model)  # logs the tensors that have another shape
    if state.average:
        update_average(state, weight=1.0)


def resume_args(config: Config, out: Path) -> list[str]:
    """The options that the same command also needs to resume this run, which writes to `out`.

    A --resume that names another run counts until this run has a checkpoint, so it stays.
    """
    args = [] if config.out else ["--out", str(out)]
    goes_back = Path(config.resume).resolve().parent == (out / "checkpoints").resolve()
    return [*args, "--resume", "auto"] if goes_back else args


# --- the beginning of a training ---


def data_dir(config: Config) -> Path:
    """The folder of the data set. Raises UserError if the user has named one that does not exist."""
    if config.data_dir is None:
        if config.dataset == "image-folder":
            raise mpiddp.UserError("--dataset image-folder needs --data-dir DIR, with train/ and val/.")
        return datasets.default_folder()
    if not Path(config.data_dir).is_dir():
        raise mpiddp.UserError(f"--data-dir {config.data_dir} is not a folder (looked in {Path.cwd()}).")
    return Path(config.data_dir)


def open_data(config: Config, device: torch.device, rank: int) -> Data:
    """Open the data set on the device. Raises UserError if it is missing or invalid."""
    is_folder = config.dataset == "image-folder"
    if config.use_syn:
        num_images, num_classes = (1_281_167, 1000) if is_folder else (50_000, 10)
        seed = config.seed * 1_000_003 + rank
        images = datasets.RandomImages(
            num_images, num_classes, config.image_size, config.batch_size, seed, device
        )
        return Data(f"synthetic {config.dataset}", num_classes, images, None)
    if is_folder:
        return datasets.image_folder(
            data_dir(config),
            device,
            size=config.image_size,
            seed=config.seed,
            num_workers=config.num_workers,
            skips=say_skipped() if config.skip_bad_images else None,
        )
    return datasets.cifar10(data_dir(config), device, seed=config.seed, max_shift=config.max_shift)


def say_skipped() -> Callable[[str], None]:
    skipped: set[str] = set()

    def say(problem: str) -> None:
        skipped.add(problem)
        log.warning(f"warning: {problem} Skipped: {len(skipped)} on this rank so far.")

    return say


def build_sampler(config: Config, data: Data) -> mpiddp.Sampler:
    """The images of this rank at each step. Raises UserError if an epoch has none."""
    if data.train.num_images < config.global_batch_size:
        raise mpiddp.UserError(
            f"the global batch of {config.global_batch_size} images is larger than the data set "
            f"({data.train.num_images} images). Lower --batch-size or --global-batch-size."
        )
    return mpiddp.Sampler(
        data.train.num_images,
        config.global_batch_size,
        seed=config.seed,
        batches_per_step=config.grad_accum_steps,
        steps_per_epoch=config.steps_per_epoch,
    )


def choose_kernels(config: Config) -> None:
    """Select the fastest kernel that cuDNN finds for each shape, or with --deterministic reproducible ones.

    Call this before the first operation on a GPU, because cuBLAS reads its variable once.
    """
    if not config.deterministic:
        torch.backends.cudnn.benchmark = True
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)  # an operation without a reproducible kernel raises


def build_state(
    config: Config, data: Data, sampler: mpiddp.Sampler, world: mpiddp.World, device: torch.device
) -> State:
    """The state of a training with a fresh model: in shards, or else under DDP. A collective."""
    model = build_model(config, data, device)
    if config.parallel == "ddp":
        ddp = wrap_in_ddp(model, config)
    else:
        num_hosts = world.num_nodes or 1 if config.parallel == "hsdp" else 1
        ddp = shard(model, config.amp, copies=num_hosts)
    scored = model
    if config.compile == "on":
        ddp = torch.compile(ddp)  # type: ignore[assignment]
        scored = torch.compile(model)  # type: ignore[assignment]
    torch.manual_seed(config.seed + 1 + dist.get_rank())
    has_average = config.ema_decay is not None
    weights = model.state_dict().items()
    average = {name: value.clone() for name, value in weights} if has_average else {}
    scaler = torch.amp.GradScaler(device.type, enabled=config.amp == "fp16")
    optimizer = build_optimizer(model, config)
    return State(config, data, sampler, model, ddp, scored, optimizer, scaler, average)


def build_model(config: Config, data: Data, device: torch.device) -> nn.Module:
    """The bare model on the device, the same on every rank, in the memory layout of the images.

    fully_shard accepts contiguous weights only. A GPU computes in the layout of the images all the same.
    """
    torch.manual_seed(config.seed)
    model: nn.Module = ARCHS[config.arch](num_classes=data.num_classes, stem=config.stem)
    if isinstance(model, WhitenedResNet):
        numbers = torch.arange(min(WHITENING_IMAGES, data.train.num_images))
        ((images, _),) = data.train.batches([numbers], epoch=0)
        model.whiten(images.cpu())
    if config.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    layout = torch.channels_last if config.parallel == "ddp" else torch.contiguous_format
    model.to(device, memory_format=layout)  # type: ignore[call-overload]
    if device.type == "cuda" and config.parallel == "ddp":
        stride_as_gradients(model)
    return model


def stride_as_gradients(model: nn.Module) -> None:
    """Give the weights of 1×1 convolutions the strides of their gradients under channels_last.

    Both strides describe the same memory. cuDNN writes gradients with channels_last's strides, and torch
    leaves such weights as they are, so DDP would copy each of these gradients in every step, and warn.
    """
    for parameter in model.parameters():
        if parameter.ndim == 4 and parameter.shape[2:] == (1, 1):
            channels = parameter.shape[1]
            strides = (channels, 1, channels, channels)
            parameter.data = parameter.data.as_strided(parameter.shape, strides)


def wrap_in_ddp(model: nn.Module, config: Config) -> nn.Module:
    """The model under DistributedDataParallel, with its final buckets; one rank needs none. A collective.

    DDP regroups its gradients after the first backward pass. Sums over three or more ranks depend on the
    grouping, so without two discarded passes a resumed run would sum differently from an uninterrupted one.
    """
    if dist.get_world_size() == 1:
        return model
    # DDP would give all ranks BatchNorm's statistics of rank 0. torch 2.13 renamed the option.
    names = DistributedDataParallel.__init__.__code__.co_varnames
    renamed = "forward_sync_buffers" in names
    keep_own: dict[str, Any] = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, **keep_own)
    device = next(model.parameters()).device
    images = torch.zeros(2, 3, config.image_size, config.image_size, device=device)
    ddp.eval()  # BatchNorm keeps its statistics, and nothing draws a random number
    for _ in range(2):
        ddp(images).sum().backward()
    ddp.train()
    ddp.zero_grad()
    return ddp


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """The optimizer of --optimizer. Weight decay is on convolutions and the last layer's matrix only."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim > 1]
    vectors = [p for p in trained if p.ndim <= 1]  # BatchNorm and biases
    undecayed = {"params": vectors, "weight_decay": 0.0}
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, undecayed]
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, fused=not is_sharded(model))
    if config.optimizer == "muon":
        # SGD trains the last layer, and a convolution of the images, because its filters are few and small.
        hidden = [p for p in matrices if p.ndim == 4 and p.shape[1] > 3]
        ends = [p for p in matrices if p.ndim != 4 or p.shape[1] <= 3]
        others = ({"params": ends, "weight_decay": config.weight_decay}, undecayed)
        return Muon(hidden, others, lr=config.lr, momentum=config.momentum)
    optimizer = torch.optim.SGD(
        groups,
        lr=config.lr,
        momentum=config.momentum,
        nesterov=config.momentum > 0,  # torch refuses it without momentum, where both are plain SGD
        fused=not is_sharded(model),
        foreach=is_sharded(model),  # torch has no fused SGD for shards
    )
    if config.amp == "fp16":
        # If fp16 overflows at the very first step, torch 2.13's fused SGD skips the step but keeps the
        # uninitialized momentum that it has allocated. Zeros give the same first step.
        for parameter in (*matrices, *vectors):
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


# --- checks ---


def gathered(value: Any) -> list[Any]:
    """The values of all ranks, by rank: [world_size]. A collective: every rank must call it."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def check_ranks(config: Config, data: Data, world: mpiddp.World) -> None:
    """Raise UserError unless all ranks train the same. A collective."""
    compared = {f"--{name.replace('_', '-')}": str(value) for name, value in vars(config).items()}
    compared |= {"--backend": str(world.backend), "--num-workers": "", "--data-dir": ""}  # of each host
    compared["the data set"] = data.contents
    hints = {"the data set": "Use the same --data-dir on every host."}
    if config.parallel == "hsdp":  # the ranks of a host share a copy of the model
        compared["the number of ranks of a host"] = f"{world.local_world_size}"
        hints["the number of ranks of a host"] = "Give equal slots, or use --parallel fsdp."
        if config.check_divergence and world.num_nodes in (None, 1):
            copies = "copies of the model, and --parallel hsdp has one on one host"
            raise mpiddp.UserError(f"--check-divergence compares {copies}. Leave one out.")
    by_rank = gathered(compared)
    for name in compared:
        values = [of_rank.get(name) for of_rank in by_rank]
        if len(set(values)) > 1:
            listed = ", ".join(f"{value} (rank {values.index(value)})" for value in dict.fromkeys(values))
            hint = hints.get(name, "Give all ranks the same options.")
            raise mpiddp.UserError(f"{name} differs: {listed}. {hint}")


def check_divergence(state: State, step: int) -> None:
    """End the job if the ranks' bits differ, before a save, so that a restart resumes from equal ranks."""
    with mpiddp.together():  # so that the ranks with other shards end, too
        same = ranks_with_same_shards(state.model)
        mpiddp.check_divergence(state.model, state.optimizer, step=step, group=same)


def first_steps(
    begin: Callable[[], State],
) -> tuple[nn.Module, torch.optim.Optimizer, Iterator[Tensor]]:
    """A fresh training for `mpiddp.check_determinism`: each iteration makes a step, and has its loss."""
    state = begin()
    return state.model, state.optimizer, (step.loss_sum for step in steps(state, 0))


def out_of_memory(error: BaseException, options: argparse.Namespace, config: Config) -> str:
    """The sentence for a GPU whose memory is full. It says how to keep the global batch."""
    place = " in the place of --batch-size" if options.batch_size else ""
    batch = f"--global-batch-size {config.global_batch_size}"
    passes = f"{batch} --grad-accum-steps {2 * config.grad_accum_steps}{place}"
    return f"{error} The same global batch in half of the memory: {passes}."


# --- records: lines, numbers, a forecast, a summary ---


class Records:
    """The lines and the numbers of a training, and its summary. All ranks make the same calls."""

    def __init__(self, state: State, world: mpiddp.World, step: int) -> None:
        config = state.config
        self._state, self._world, self._scored_at = state, world, step
        self._total = state.sampler.steps_per_epoch * config.epochs
        self._started_at = time.monotonic()
        self._loss_sum = torch.zeros((), device=state.data.train.device)
        self._train_loss: float | None = None
        self._spans: list[tuple[int, float]] = []  # steps, and the seconds of each
        self._made = 0  # steps in this process
        self._added = self._timed = 0  # steps since the last record, and of these, the timed steps
        log.info(
            f"{counted(world.world_size, 'rank')} on {counted(world.num_nodes or 1, 'host')} over "
            f"{world.backend}, {config.parallel}, {config.arch} ({config.stem} stem) on {state.data.name}, "
            f"amp {config.amp}, global batch {config.global_batch_size}, --lr {config.lr:g}"
        )
        if config.compile == "on":
            log.info("compiling the model takes up to a minute; --compile off trains without a delay")
        self._began = time.perf_counter()

    def add(self, step: Step) -> None:
        """Add a step, and record the loss and the speed now and then."""
        self._made, self._added, self._timed = self._made + 1, self._added + 1, self._timed + 1
        self._loss_sum += step.loss_sum
        mpiddp.progress(step.number, self._total)
        is_early = self._made in (STARTUP_STEPS, 2 * STARTUP_STEPS)
        if is_early:
            self._loss_sum.item()  # waits for the device
        if self._made == 2 * STARTUP_STEPS:
            step_s = (time.perf_counter() - self._began) / self._timed
            left = self._left(step.number, step_s)
            log.info(f"{self._total - step.number:,} steps to come, in about {left}")
        if step.number % self._state.config.log_every == 0 or step.ends_epoch:
            self._record(step)
        elif self._made == STARTUP_STEPS:  # do not count them, because the first steps are slow
            self._timed, self._began = 0, time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time of the body as a step's."""
        began = time.perf_counter()
        yield
        self._began += time.perf_counter() - began

    def _record(self, step: Step) -> None:
        config = self._state.config
        dist.all_reduce(self._loss_sum)
        loss = self._loss_sum.item() / (self._added * config.global_batch_size)
        step_s = (time.perf_counter() - self._began) / self._timed
        was_finite = self._train_loss is None or math.isfinite(self._train_loss)
        if was_finite and not math.isfinite(loss) and self._world.rank == 0:
            log.warning(
                f"warning: the loss is {loss} at step {step.number}. Stop the run, and start it again with a "
                "lower --lr or --clip-grad-norm: it resumes from its newest finite checkpoint."
            )
        self._train_loss = loss
        self._spans.append((self._timed, step_s))
        self._loss_sum, self._added, self._timed = torch.zeros_like(self._loss_sum), 0, 0
        speed = config.global_batch_size / step_s
        values = {"lr": step.lr, "train_loss": loss, "images_per_s": speed, "step_time_s": step_s}
        mpiddp.log_metrics(step.number, epoch=step.epoch, **values)
        log.info(
            f"epoch {step.epoch + 1}/{config.epochs}  step {step.number}/{self._total}  loss {loss:.4f}  "
            f"lr {step.lr:.4f}  {speed:,.0f} images/s  {self._left(step.number, step_s)} left"
        )
        self._began = time.perf_counter()

    def add_score(self, step: Step, score: Score) -> None:
        self._scored_at = step.number
        values = {"test_accuracy": score.accuracy, "test_loss": score.loss}
        mpiddp.log_metrics(step.number, epoch=step.epoch, **values)
        log.info(
            f"epoch {step.epoch + 1}/{self._state.config.epochs}  test accuracy {score.accuracy:.2%}  "
            f"{self._left(step.number, self._spans[-1][1])} left"
        )

    def _left(self, step: int, step_s: float) -> str:
        return duration(seconds_left(self._state, step, step_s, self._scored_at))

    def end(self, step: int, score: Score | None) -> None:
        """Write summary.json, and print it as a table. A collective."""
        summary = self._summary(step, score)
        if self._world.rank == 0:
            file = mpiddp.run_dir() / "summary.json"
            # If the resume had no step left, the summary that the run has written before is still true.
            if summary["train_loss"] is None and steps_in(file) == step:
                file.touch()
            else:
                save_json(file, summary)
            log.info(f"\n{table(summary)}\n{mpiddp.run_dir()}")

    def _summary(self, step: int, score: Score | None) -> dict[str, Any]:
        config, world, data = self._state.config, self._world, self._state.data
        # There is no time of a step if the run has resumed after its last step.
        times = np.repeat([step_s for _, step_s in self._spans], [count for count, _ in self._spans])
        middle, high = np.percentile(times, (50, 95)).tolist() if len(times) else (None, None)
        return {
            "dataset": data.name,
            "arch": config.arch,
            "num_parameters": sum(p.numel() for p in self._state.model.parameters()),
            "world_size": world.world_size,
            "num_nodes": world.num_nodes,
            "hosts": dict(Counter(gathered(world.hostname))),
            "global_batch_size": config.global_batch_size,
            "epochs": config.epochs,
            "steps": step,
            "train_loss": self._train_loss,
            "test_accuracy": None if score is None else score.accuracy,
            "test_images": None if data.test is None else data.test.num_images,
            "parallel": config.parallel,
            "images_per_s": config.global_batch_size / float(times.mean()) if len(times) else None,
            "step_time_p50_s": middle,
            "step_time_p95_s": high,
            "wall_s": time.monotonic() - self._started_at,
        }


def seconds_left(state: State, step: int, step_s: float, scored_at: int) -> float:
    """About how long the rest takes, if `step` took `step_s` and the last evaluation was after `scored_at`.

    The time is in proportion to the pixels. An evaluation has no backward pass, and takes about a third.
    """
    config, length, test = state.config, state.sampler.steps_per_epoch, state.data.test
    pixel_s = step_s / config.image_side(max(0, step - 1) // length) ** 2
    test_steps = test.num_images / config.global_batch_size / 3 if test else 0.0
    left_s = 0.0
    for epoch in range(config.epochs):
        end = (epoch + 1) * length
        left_s += min(length, max(0, end - step)) * pixel_s * config.image_side(epoch) ** 2
        if end > scored_at and is_evaluated(epoch, config):
            left_s += test_steps * pixel_s * config.image_size**2
    return left_s


def duration(seconds: float) -> str:
    """ "40 s", "3 min 20 s", "45 min" or "3.5 h"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 1200:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def table(summary: Mapping[str, Any]) -> str:
    """A line for each value of the summary."""
    shown = {name: f"{value:.4g}" for name, value in summary.items() if isinstance(value, float)}
    hosts = ", ".join(f"{name} {count}" for name, count in summary["hosts"].items())
    lines = {**summary, **shown, "hosts": hosts}
    return "\n".join(f"{name:<18} {'-' if value is None else value}" for name, value in lines.items())


def counted(number: int, noun: str) -> str:
    """ "1 rank", "2 ranks"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def steps_in(summary: Path) -> Any:
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        return json.loads(summary.read_bytes())["steps"]


def save_json(path: Path, values: Mapping[str, Any]) -> None:
    """Replace the file, or on an error leave the existing one. NaN and infinities become null."""
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(finite, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


if __name__ == "__main__":
    sys.exit(main())
