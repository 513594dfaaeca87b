"""`mpiddp train`: the training of train.py with all options, for many kinds of machines.

    mpiddp launch -n 2 -m mpiddp train --epochs 2 --out runs/a
    cp mpiddp/train/train.py mine.py && mpiddp launch -n 2 mine.py --epochs 2 --out runs/a

It adds to train.py: options with checks and help, random images, mixup, schedules, AdamW, clipping, an
average, fp16, compiling, shards, batches that stay the same on other numbers of ranks, checks of the ranks, a
forecast and a summary. With the same recipe, both have the same bits.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import random
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import mpiddp
from mpiddp.arguments import OneSentenceParser, common, flag_of, option, options_of, whole
from mpiddp.checkpoints.folders import CONFIG, SUMMARY
from mpiddp.files import replace_file
from mpiddp.text import counted, duration, parse_interval, shown
from mpiddp.train import data as datasets
from mpiddp.train import parallel
from mpiddp.train import train as plain
from mpiddp.train.data import DATASETS, Data
from mpiddp.train.resnet import ARCHITECTURES, ARCHS
from mpiddp.train.train import DONE, STOPPED, Recipe, Step, Training

IMAGES_PER_PASS = 2  # the minimum that BatchNorm can normalize
AVERAGE_EVERY = 32  # steps between two updates of the average, as in torchvision's references
LARGE_IMAGE = 64  # pixels; CIFAR's stems are for smaller images
STARTUP_STEPS = 3  # slow because of page faults and kernel selection; left out of the speed
log = logging.getLogger("mpiddp.train")  # rank 0 prints it


# --- the options ---


def number(low: float, below: float = math.inf) -> Callable[[str], float]:
    """A parser for a number from `low` on."""
    limit = "" if below == math.inf else f" and less than {below:g}"

    def parsed(text: str) -> float:
        with contextlib.suppress(ValueError):
            if low <= (value := float(text)) < below:
                return value
        expected = f"expected a number of at least {low:g}{limit}"
        raise argparse.ArgumentTypeError(f"{expected}, not {shown(text)!r}")

    return parsed


def interval(text: str) -> str:
    """20 (steps), 30s, 10m or 1.5h: `mpiddp.Checkpoints` takes the text."""
    try:
        parse_interval(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def path(text: str) -> str:
    """A path as written. An empty path usually comes from a shell variable that is not set."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, not an empty string")
    return text


# The part of the peak rate after this part of the steps that follow the warm-up.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "one-cycle": lambda progress: 1 - progress,
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,  # Loshchilov & Hutter 2016
    "step": lambda progress: 0.1 ** sum(progress >= mark for mark in (1 / 2, 3 / 4, 7 / 8)),
    "constant": lambda progress: 1.0,
}
_POSITIVE, _FRACTION = number(1e-12), number(0, 1)
NAMES = tuple(ARCHS)


# fmt: off
@dataclass(frozen=True)
class Config(Recipe):
    """The settings of a training, resolved. `mpiddp train --help-all` lists them; config.json has them."""

    arch: str = common(group="model", choices=NAMES, metavar="ARCH",
        help=f"{', '.join(NAMES)} (default: by the device)")
    stem: str = option(choices=("auto", "imagenet", "cifar"), default="auto", help="first layers (default: auto)")
    weights: str | None = common(value="PATH", parse=path, help="begin with this checkpoint, run or .safetensors file")

    dataset: str = common(group="data", choices=tuple(DATASETS), default="cifar10", help="(default: cifar10)")
    data_dir: str | None = common(value="DIR", parse=path, help="(default: $MPIDDP_DATA, else ~/.cache/mpiddp)")
    use_syn: bool = common(help="random images and labels in the data set's shape")
    image_size: int = option(value="N", parse=whole(1), help="pixels of an image folder's images (default: 224)")
    num_workers: int = option(value="N", parse=whole(0),
        help="processes that decode, per rank (default: a rank's cores)")
    skip_bad_images: bool = option(help="go on without images that cannot be read")
    batch_size: int = common(value="N", parse=whole(1),
        help="images per rank and pass (default: 128 on CPUs, 256 on GPUs)")
    global_batch_size: int = common(value="N", parse=whole(1), help="images per step over all ranks; or --batch-size")
    grad_accum_steps: int = option(value="N", parse=whole(1), default=1, help="backward passes per step (default: 1)")
    mixup: float = option(value="A", parse=_FRACTION, default=0.0,
        help="mix pairs of images, by a draw from Beta(A, A) (default: 0, off)")

    epochs: int = common(group="schedule", value="N", parse=whole(1),
        help="(default: 6 on CPUs, 13 on those with bf16, 30 on GPUs)")
    steps_per_epoch: int | None = option(value="N", parse=whole(1), help="end every epoch after this many steps")
    lr: float = common(value="LR", parse=_POSITIVE,
        help="peak; that of sgd is for 256 images, and scales with the batch (default: 0.4, of whitened_resnet8 0.25, "
        "of adamw 1e-3)")
    schedule: str = option(choices=tuple(SCHEDULES), default="one-cycle", help="learning rate (default: one-cycle)")
    optimizer: str = common(choices=("sgd", "adamw", "muon"), help="(default: muon for whitened_resnet8, else sgd)")
    momentum: float = option(value="BETA", parse=_FRACTION, default=0.9, help="Nesterov's (default: 0.9)")
    weight_decay: float = option(value="DECAY", parse=_FRACTION,
        help="(default: 5e-4 for CIFAR, 1e-4 for image folders)")
    label_smoothing: float = option(value="PART", parse=_FRACTION,
        help="of the training loss (default: 0, of whitened_resnet8 0.1)")
    clip_grad_norm: float | None = option(value="NORM", parse=_POSITIVE, help="limit of the gradients' norm")
    ema_decay: float | None = option(value="DECAY", parse=_FRACTION,
        help="average the weights, and evaluate the average")

    backend: str | None = option(group="engine", choices=("nccl", "gloo"), help="(default: nccl with a GPU, else gloo)")
    amp: str = common(choices=("auto", "bf16", "fp16", "off"), default="auto", help="mixed precision (default: auto)")
    parallel: str = common(choices=("ddp", "fsdp", "hsdp"), default="ddp", help="copies or shards (default: ddp)")
    sync_bn: bool = option(help="BatchNorm statistics over all ranks, on GPUs")
    compile: str = option(choices=("auto", "on", "off"), nargs="?", const="on", default="auto", help="(default: auto)")
    seed: int = option(value="N", parse=whole(0), default=0, help="of weights, order and augmentation (default: 0)")
    deterministic: bool = option(help="deterministic kernels, on GPUs too")

    out: str | None = common(group="run", value="DIR", parse=path,
        help="folder of the run (default: runs/<time>-<arch>)")
    resume: str = common(value="auto|PATH", parse=path, default="auto",
        help="auto: newest checkpoint in --out (default: auto)")
    save_every: str | None = common(value="STEPS|TIME", parse=interval, help="20, 30s or 10m (default: once an epoch)")
    keep: int = option(value="N", parse=whole(2), default=2, help="checkpoints to keep (default: 2)")
    log_every: int = option(value="STEPS", parse=whole(1), default=50, help="(default: 50)")
    stop_at_step: int | None = option(value="STEP", parse=whole(1), help="save after this step and exit with code 75")

    check_determinism: int | None = option(group="checks", value="N", parse=whole(1), nargs="?", const=10,
        help="compare two runs of 10 steps, or N")
    check_divergence: int | None = option(value="STEPS", parse=whole(1), help="how often to compare the ranks")
# fmt: on


# For another model than the recipe's, and for AdamW: the usual values.
_OTHER_MODEL: dict[str, Any] = {"optimizer": "sgd", "lr": 0.4, "label_smoothing": 0.0, "sides": ()}
_OTHER_OPTIMIZER: dict[str, dict[str, Any]] = {"adamw": {"lr": 1e-3, "weight_decay": 0.05}}


def parse(argv: list[str]) -> argparse.Namespace:
    """The options that the user has set. All others have their default, or None. Raises UserError."""
    parser = OneSentenceParser(
        prog="mpiddp train",
        usage="%(prog)s [options]",
        description="Train a ResNet: alone, as a rank of a job, or by -n or -H as a job of its own.",
        record=Config,
    )
    group: Any = parser
    for name, row in options_of(Config).items():
        if title := row.metadata["group"]:
            group = parser.add_argument_group(title)
        row.metadata["option"].add_to(group, dest=name, default=row.default)
    options = parser.parse_args(argv)
    sharded, is_ddp = f"--parallel {options.parallel}", options.parallel == "ddp"
    determinism, resumes = options.check_determinism, options.resume != "auto"
    for first, second, are_given in (
        ("--batch-size", "--global-batch-size", options.batch_size and options.global_batch_size),
        ("--check-determinism", "--resume PATH", determinism and resumes),
        ("--compile", sharded, not is_ddp and options.compile == "on"),
        ("--optimizer muon", sharded, not is_ddp and options.optimizer == "muon"),
        ("--sync-bn", sharded, not is_ddp and options.sync_bn),
        ("--check-divergence", sharded, options.parallel == "fsdp" and options.check_divergence),
    ):
        if are_given:
            raise mpiddp.UserError(f"{first} and {second} are mutually exclusive.", fix="leave one out")
    if options.image_size and DATASETS[options.dataset].image_size:
        raise mpiddp.UserError("--image-size applies to image folders only.", fix="leave it out")
    return options


def resolve(options: argparse.Namespace, world_size: int, device: torch.device) -> Config:
    """The configuration that these options of `parse` have here. Raises UserError if they cannot be met.

    What the user has not set is that of the recipe for the data set and the device. A model that the user
    names has the recipe of that model, or else the usual settings of SGD.
    """
    chosen = {name: value for name, value in vars(options).items() if value not in (None, "auto")}
    on_cpu, is_ddp = device.type == "cpu", options.parallel == "ddp"
    recipe = plain.recipe_for(options.dataset, device, chosen.get("amp"))
    is_folder = DATASETS[options.dataset].image_size is None
    image_size = options.image_size or recipe.image_size
    is_large = image_size >= LARGE_IMAGE
    arch = options.arch or recipe.arch
    if arch != recipe.arch:
        rows = (row for row in plain.RECIPES.values() if row.dataset == options.dataset)
        recipe = next((row for row in rows if row.arch == arch), replace(recipe, **_OTHER_MODEL))
    is_whitened = arch == "whitened_resnet8"
    if is_whitened and (is_folder or "stem" in chosen):
        sentence = f"{arch} is for CIFAR, and has a stem of its own."
        raise mpiddp.UserError(sentence, fix="another --arch, for example resnet18")
    # A model that the user names is torchvision's, or of its paper. On GPUs, only the CIFAR stem leaves
    # enough of CIFAR's images: torchvision's halves them twice before the first block.
    stem = recipe.stem
    if options.arch is not None and not is_whitened:
        stem = "imagenet" if is_large else ARCHITECTURES[arch].stem
    has_muon = recipe.optimizer == "muon" and is_ddp and options.amp != "fp16"
    ranks_on_host = mpiddp.World.from_env().local_world_size or 1
    settings = {
        **vars(options),
        **vars(recipe),
        "arch": arch,
        "stem": stem,
        "optimizer": "muon" if has_muon else "sgd",
        "num_workers": max(1, len(os.sched_getaffinity(0)) // ranks_on_host),
        # Large images on a GPU are worth the minute that it takes.
        "compile": "on" if device.type == "cuda" and is_large and is_ddp else "off",
        **_OTHER_OPTIMIZER.get(options.optimizer, {}),
        **chosen,
        **split_batch(options, mpiddp.announced(), world_size, recipe.batch_size),
    }
    config = Config(**settings)
    if config.sync_bn and on_cpu:
        has_none = "torch's SyncBatchNorm has no kernels for CPUs."
        raise mpiddp.UserError(f"--sync-bn needs GPUs: {has_none}")
    # A stem halves the sides of the images up to two times, and each group of blocks but the first once.
    depths = 4 if is_whitened else len(ARCHITECTURES[arch].depths) - 1
    halvings = depths + 2 * (config.stem == "imagenet")
    per_pass = config.batch_size * (world_size if config.sync_bn else 1)
    if per_pass == 1 and min(config.sides or (image_size,)) <= 1 << halvings:
        raise mpiddp.UserError(
            f"--batch-size 1 leaves BatchNorm one value: {arch} with the {config.stem} stem reduces such "
            "images to one pixel.",
            fix="--batch-size 2, or more",
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
            "BatchNorm needs two.",
            fix=f"--global-batch-size {IMAGES_PER_PASS * parts}, or more",
        )
    return {"global_batch_size": images, "grad_accum_steps": passes, "batch_size": -(-images // parts)}


# --- the training ---


class Trainer(Training):
    """The training of train.py with all options."""

    def __init__(self, config: Config, data: Data, world: mpiddp.World, out: Path) -> None:
        self.config, self.out = config, out
        # What the same command also needs to resume this run.
        self.resume_args = [] if config.out else ["--out", str(out)]
        self.average: dict[str, Tensor] = {}  # of the model's state_dict, once it has begun
        images = data.train.num_images
        if images < config.global_batch_size:
            raise mpiddp.UserError(
                f"the global batch of {config.global_batch_size} images is larger than the data set ({images} images).",
                fix="a smaller --batch-size or --global-batch-size",
            )
        sizes = {name: getattr(config, name) for name in ("global_batch_size", "steps_per_epoch")}
        super().__init__(config, data, world, **sizes)
        if config.compile == "on":
            self.ddp = torch.compile(self.ddp)  # type: ignore[assignment]
            self.scored = torch.compile(self.model)  # type: ignore[assignment]
        self.log_every = config.log_every
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.amp == "fp16")
        self._by_side: dict[int, list[float]] = {}  # the seconds of all steps, by the side of their images
        self._started_at = time.monotonic()

    def seed(self) -> None:
        super().seed()
        seed = self.config.seed + 1 + dist.get_rank()
        random.seed(seed)
        np.random.seed(seed % (1 << 32))  # numpy's largest

    def build_model(self) -> nn.Module:
        """fully_shard accepts contiguous weights only. A GPU computes in the images' layout all the same."""
        model = super().build_model()
        if self.config.sync_bn:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        if self.config.parallel != "ddp":
            return model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload, no-any-return]
        if self.device.type == "cuda":
            stride_as_gradients(model)
        return model

    def parallelize(self) -> nn.Module:
        if self.config.parallel == "ddp":
            return super().parallelize()
        num_hosts = self.world.num_nodes or 1 if self.config.parallel == "hsdp" else 1
        return parallel.shard(self.model, self.config.amp, copies=num_hosts)

    def build_optimizer(self) -> torch.optim.Optimizer:
        config = self.config
        if config.optimizer == "adamw":
            groups = self.parameter_groups()
            return torch.optim.AdamW(groups, lr=config.lr, fused=not parallel.is_sharded(self.ddp))
        optimizer = super().build_optimizer()
        if config.amp == "fp16" and config.optimizer == "sgd":
            # If fp16 overflows at the very first step, torch 2.13's fused SGD skips the step but keeps the
            # uninitialized momentum that it has allocated. Zeros give the same first step.
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return optimizer

    def schedule(self, progress: float) -> float:
        return SCHEDULES[self.config.schedule](progress)

    def loss(self, images: Tensor, labels: Tensor, step: int) -> Tensor:
        """With --mixup, an image is mixed with its neighbour, by one draw for all ranks (Zhang 2017)."""
        if not self.config.mixup:
            return super().loss(images, labels, step)
        smoothing = self.config.label_smoothing
        cross_entropy = partial(F.cross_entropy, reduction="sum", label_smoothing=smoothing)
        draw = random.Random(f"{self.config.seed}/{step}")
        part = draw.betavariate(self.config.mixup, self.config.mixup)
        logits = self.ddp(part * images + (1 - part) * images.roll(1, 0))
        of_neighbours = cross_entropy(logits, labels.roll(1, 0))
        return part * cross_entropy(logits, labels) + (1 - part) * of_neighbours

    def autocast(self) -> torch.autocast:
        """A sharded model has its own policy instead, see parallel.py."""
        amp, is_on = self.config.amp, self.config.amp != "off" and self.config.parallel == "ddp"
        return torch.autocast(self.device.type, dtype=parallel.DTYPES.get(amp), enabled=is_on)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def update(self, step: int) -> None:
        if self.config.clip_grad_norm is not None:  # torch takes the norm over all shards
            self.scaler.unscale_(self.optimizer)
            clip_grad_norm_(self.model.parameters(), self.config.clip_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if weight := self.average_weight(step + 1):
            self.update_average(weight)

    def average_weight(self, step: int) -> float:
        """The weight of the model after this step, from 1 on, in the average; 0 leaves the average alone.

        As in torchvision's references, it is 1 in the warm-up. Afterwards --ema-decay is for one image
        between two updates of a training of one epoch, so the same value suits any batch and any epochs.
        """
        decay = self.config.ema_decay
        if decay is None or step % AVERAGE_EVERY != 1:
            return 0.0
        images, epochs = self.global_batch_size * AVERAGE_EVERY, self.config.epochs
        return 1.0 if step <= self.warmup_steps else min(1.0, (1 - decay) * images / epochs)

    @torch.no_grad()
    def update_average(self, weight: float) -> None:
        """Move the average by this part of its distance to the model. It begins as the model."""
        for name, value in self.model.state_dict().items():
            average = self.average.setdefault(name, value.clone())
            if average.is_floating_point():
                average.lerp_(value, weight)
            else:  # BatchNorm's count of batches
                average.copy_(value)

    def run(self, checkpoints: mpiddp.Checkpoints) -> int:
        code = super().run(checkpoints)
        if code == STOPPED:
            arguments = shlex.join(self.resume_args)
            command = f"the same command{' with ' if arguments else ''}{arguments}"
            log.info(f"stopped at step {self.step}. To resume, run {command}.")
            return code
        self.end()
        return code

    def should_stop(self, made: Step) -> bool:
        return mpiddp.should_stop() or made.number == self.config.stop_at_step

    def report(self, made: Step) -> None:
        number, before = made.number - self._first, self.train_loss
        if number == STARTUP_STEPS + 1:  # forget the first steps, which are slow
            self._seconds, self._by_side = [], {}
        if number == 2 * STARTUP_STEPS:
            self.read_clock(made)
            left = duration(self.seconds_left(made.number))
            log.info(f"{self.num_steps - made.number:,} steps to come, in about {left}")
        super().report(made)
        turns_bad = math.isfinite(before or 0.0) and not math.isfinite(self.train_loss or 0.0)
        if turns_bad and self.world.rank == 0:
            log.warning(
                f"warning: the loss is {self.train_loss} at step {made.number}. Stop the run, and start it "
                "again with a lower --lr or --clip-grad-norm: it resumes from its newest checkpoint."
            )
        if self.config.check_divergence and made.number % self.config.check_divergence == 0:
            self.check_divergence(made.number)

    def read_clock(self, made: Step) -> list[float]:
        seconds = super().read_clock(made)
        self._by_side.setdefault(made.side, []).extend(seconds)
        return seconds

    def left(self, made: Step) -> str:
        return f"  {duration(self.seconds_left(made.number))} left"

    def seconds_left(self, step: int) -> float:
        """About how long the rest takes after this step."""
        made = sum(pixels_of(side) * len(seconds) for side, seconds in self._by_side.items())
        epochs = self.recipe.epochs
        # An evaluation has no backward pass, and takes about a third of the time of steps.
        num_tested = self.data.test.num_images if self.data.test is not None else 0
        score = num_tested / self.global_batch_size / 3 * pixels_of(self.data.image_size)
        left = 0.0
        for epoch in range(epochs):
            end = (epoch + 1) * self.length
            left += min(self.length, max(0, end - step)) * pixels_of(self.side(epoch))
            views = self.recipe.views if epoch == epochs - 1 else 1
            left += score * views * (end > step and self.is_scored(epoch))
        return left / made * sum(map(sum, self._by_side.values()))

    def check_divergence(self, step: int) -> None:
        """End the job if the ranks' bits differ. Before a save: then a restart resumes from equal ranks."""
        with mpiddp.together():  # the ranks with other shards end, too
            same = parallel.ranks_with_same_shards(self.model)
            mpiddp.check_divergence(self.model, self.optimizer, step=step, group=same)

    def changed_to_score(self) -> Mapping[str, Tensor]:
        return self.average or super().changed_to_score()

    def save(self, checkpoints: mpiddp.Checkpoints, step: int) -> None:
        interval = self.config.check_divergence
        if interval and step % interval:
            self.check_divergence(step)
        super().save(checkpoints, step)

    def state(self) -> dict[str, Any]:
        state = {**super().state(), "scaler": self.scaler.state_dict()}
        if self.average:
            state["ema"] = parallel.mean_statistics(self.average, self.model)
        return state

    def state_of_rank(self) -> dict[str, Any]:
        names = parallel.statistics_of(self.model) if self.average else ()
        average = {"ema": {name: self.average[name] for name in names}} if names else {}
        return {**super().state_of_rank(), **average}

    def resume(self, checkpoints: mpiddp.Checkpoints) -> int:
        resume, weights = self.config.resume, self.config.weights
        with mpiddp.together():
            saved = checkpoints.resume()
            if resume != "auto":
                saved = saved or mpiddp.load(resume)
                require_same_settings(self.config, self.out, saved)
            if saved is not None:
                self.load(saved)
            elif weights:
                self.load_weights(weights)
        steps = gathered(saved and saved.step)
        with mpiddp.together():
            if len({*steps}) > 1:
                found = f"step {min(steps)} on one host, and {max(steps)} on another"
                fix = f"--resume {resume}/checkpoints/step_N, which all hosts have"
                raise mpiddp.UserError(f"the newest checkpoint of {resume} is {found}.", fix=fix)
        if checkpoints.is_writer:
            save_json(self.out / CONFIG, vars(self.config))
        return self.begin(saved.step if saved else 0)

    def begin(self, step: int) -> int:
        """Begin to train after this step, which it returns."""
        config, world = self.config, self.world
        ranks, hosts = counted(world.world_size, "rank"), counted(world.num_nodes or 1, "host")
        log.info(
            f"{ranks} on {hosts} over {world.backend}, {config.parallel}, {config.arch} ({config.stem} stem) "
            f"on {self.data.name}, amp {config.amp}, global batch {config.global_batch_size}, "
            f"--lr {config.lr:g}"
        )
        if config.compile == "on":
            log.info("compiling the model takes a minute; --compile off trains without a delay")
        self._first = step
        return step

    def load(self, saved: mpiddp.Resumed) -> None:
        if self.config.ema_decay is not None:
            average: dict[str, Any] = {"ema" if "ema" in saved.state else "model": self.model}
            saved.load_into(**average)  # through the model, which knows its shards
            self.update_average(1.0)
        super().load(saved)
        if saved.world_size == self.world_size:
            for name, value in saved.per_rank.get("ema", {}).items() if self.average else ():
                self.average[name].copy_(value)
        if saved.state["scaler"]:  # empty unless the saved run had --amp fp16
            self.scaler.load_state_dict(saved.state["scaler"])

    def load_weights(self, weights: str) -> None:
        """Begin with these weights, without the last layer if that has another number of classes."""
        saved = mpiddp.load(weights)
        # A .safetensors file has one entry, which is named after the file.
        name = next(iter(saved.state)) if len(saved.state) == 1 else "model"
        entry = saved.state.get(name)
        if not isinstance(entry, dict) or entry.keys() != self.model.state_dict().keys():
            raise mpiddp.UserError(f"--weights {weights}: it is of another model than --arch {self.config.arch}.")
        # It logs the tensors that have another shape.
        saved.load_into(strict=False, **{name: self.model})

    def end(self) -> None:
        """Write summary.json, and print it as a table. A collective."""
        summary = self._summary()
        if self.world.rank == 0:
            file = mpiddp.run_dir() / SUMMARY
            # If the resume had no step left, the summary that the run has written before is still true.
            if summary["train_loss"] is None and steps_in(file) == self.step:
                file.touch()
            else:
                save_json(file, summary)
            log.info(f"\n{table(summary, self.config)}\n{mpiddp.run_dir()}")

    def _summary(self) -> dict[str, Any]:
        config, world, data, score = self.config, self.world, self.data, self.last_score
        # There is no time of a step if the run has resumed after its last step.
        times, whole = [*chain(*self._by_side.values())], self._by_side.get(data.image_size)
        middle, high = np.percentile(whole, (50, 95)).tolist() if whole else (None, None)
        return {
            "dataset": data.name,
            "arch": config.arch,
            "num_parameters": sum(p.numel() for p in self.model.parameters()),
            "world_size": world.world_size,
            "num_nodes": world.num_nodes,
            "hosts": dict(Counter(gathered(world.hostname))),
            "global_batch_size": config.global_batch_size,
            "epochs": config.epochs,
            "steps": self.step,
            "train_loss": self.train_loss,
            "test_accuracy": score and score.accuracy,
            "accuracy_of_views": score.accuracy_of_views if score and config.views > 1 else None,
            "test_images": None if data.test is None else data.test.num_images,
            "parallel": config.parallel,
            "images_per_s": config.global_batch_size / mean(times) if times else None,
            "step_time_p50_s": middle,
            "step_time_p95_s": high,
            "wall_s": time.monotonic() - self._started_at,
        }


def pixels_of(side: int) -> int:
    """The pixels to which the time of a step is proportional, as if each image had some more."""
    return side**2 + 128


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


def choose_kernels(config: Config) -> None:
    """Before the first operation on a GPU: cuDNN's fastest kernels, or reproducible ones."""
    torch.backends.cudnn.benchmark = not config.deterministic
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)  # an operation without such a kernel raises


def open_config(config: Config, world: mpiddp.World) -> Data:
    """Open the data set, or random images in its shape. A collective. Raises UserError or JobFailed."""
    source = DATASETS[config.dataset]
    if config.use_syn:
        shape = source.num_images, source.num_classes, config.image_size, config.batch_size
        seed, device = config.seed * 1_000_003 + world.rank, torch.device(str(world.device))
        images = datasets.RandomImages(*shape, seed, device)
        return Data(f"synthetic {config.dataset}", source.num_classes, config.image_size, images, None)
    with mpiddp.together():
        folder = Path(config.data_dir or datasets.default_folder())
        if config.data_dir and not folder.is_dir():
            where = f"{config.data_dir} is not a folder (looked in {Path.cwd()})."
            raise mpiddp.UserError(f"--data-dir {where}")
    skipped: set[str] = set()

    def skip(problem: str) -> None:
        skipped.add(problem)
        log.warning(f"warning: {problem} Skipped: {len(skipped)} on this rank so far.")

    skips = skip if config.skip_bad_images else None
    how = config.image_size, config.max_shift, config.num_workers, skips
    return datasets.open_data(source, folder, world, datasets.Opening(config.seed, *how))


# --- the run ---


def main(argv: list[str] | None = None) -> int:
    """Train as one rank of a job, or alone. Returns the exit code: DONE, or STOPPED on request."""
    options = parse(sys.argv[1:] if argv is None else argv)
    with mpiddp.process_group(backend=options.backend) as world:
        device = torch.device(str(world.device))
        # A check may fail on some ranks: then all ranks refuse, before anything is written.
        with mpiddp.together():
            config = resolve(options, world.world_size, device)
            choose_kernels(config)
        data = open_config(config, world)
        started = gathered(time.strftime("%Y%m%d-%H%M%S"))[0]
        out = Path(config.out or Path("runs") / f"{started}-{config.arch}")
        with mpiddp.together():
            check_ranks(config, data, world)
        if config.check_determinism:

            def begin() -> tuple[nn.Module, torch.optim.Optimizer, Iterator[Tensor]]:
                fresh = Trainer(config, data, world, out)
                return fresh.model, fresh.optimizer, (made.loss_sum for made in fresh.steps(0))

            tensors = mpiddp.check_determinism(begin, steps=config.check_determinism)
            log.info(
                f"two runs of {config.check_determinism} steps from the same start are equal bit for bit on "
                f"{counted(world.world_size, 'rank')}, in each of {tensors} tensors of a step."
            )
            return DONE
        try:
            training = Trainer(config, data, world, out)
            mpiddp.announce(  # what the launcher needs to restart this run, on fewer hosts too
                resume_args=training.resume_args,
                global_batch_size=config.global_batch_size,
                max_ranks=max(world.world_size, config.global_batch_size // IMAGES_PER_PASS),
            )
            with open_checkpoints(training) as checkpoints:
                return training.run(checkpoints)
        except torch.OutOfMemoryError as error:
            raise mpiddp.JobFailed(str(error), fix=half_the_memory(options, config)) from error


def open_checkpoints(training: Trainer) -> mpiddp.Checkpoints:
    """The checkpoints of the run. They refuse a resume with other fixed options or data."""
    config, out = training.config, training.out
    with mpiddp.together():
        contents = data_of_run(out, config, training.data) if training.world.rank == 0 else ""
    return mpiddp.Checkpoints(
        out,
        keep=config.keep,
        every=config.save_every or training.length,
        config={"program": "mpiddp train", "data": gathered(contents)[0], **fixed_of(config)},
    )


def fixed_of(config: Config) -> dict[str, Any]:
    """The options that past steps depend on."""
    names = (*plain.FIXED, "use_syn", "global_batch_size", "steps_per_epoch")
    return {flag_of(name): getattr(config, name) for name in names}


def require_same_settings(config: Config, out: Path, saved: mpiddp.Resumed) -> None:
    """Raise UserError unless --resume names another run, which was made with the same options."""
    resume = config.resume
    if Path(resume).resolve().is_relative_to(out.resolve()):
        raise mpiddp.UserError(
            f"--resume {resume} is of this run.",
            fix=f"to go back, mpiddp checkpoints rewind {out} STEP, and leave --resume out",
        )
    rows = [(name, saved.about.config.get(name), now) for name, now in fixed_of(config).items()]
    if different := [f"{name} {old!r}, now {now!r}" for name, old, now in rows if old != now]:
        sentence = f"{resume} was made with another config: {'; '.join(different)}."
        raise mpiddp.UserError(sentence, fix=f"use the same config, or begin with its weights: --weights {resume}")


def data_of_run(out: Path, config: Config, data: Data) -> str:
    """The data that the run began with, because --skip-bad-images lets images be removed. For rank 0."""
    if config.skip_bad_images:
        # A run has no checkpoint yet, or one of another program.
        with contextlib.suppress(mpiddp.UserError, KeyError):
            before = str(mpiddp.load(out).about.config["data"])
            if before != data.contents:
                told = f"the run began with other data: {before}, now {data.contents}."
                log.info(f"{told} The images come in another order from here on.")
            return before
    return data.contents


# --- checks ---


def gathered(value: Any) -> list[Any]:
    """The values of all ranks, by rank: [world_size]. A collective: every rank must call it."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def check_ranks(config: Config, data: Data, world: mpiddp.World) -> None:
    """Raise UserError unless all ranks train the same. A collective."""
    # Other settings follow from --amp, so it comes first. Some are of each host.
    compared = {"--amp": config.amp}
    compared |= {flag_of(name): str(value) for name, value in vars(config).items()}
    compared |= {"--backend": str(world.backend), "--num-workers": "", "--data-dir": ""}
    compared["the data set"] = data.contents
    fixes = {
        "the data set": "use the same --data-dir on every host",
        "--amp": "--amp off, because not all hosts compute bf16 fast",
    }
    if config.parallel == "hsdp":  # the ranks of a host share a copy of the model
        compared["the number of ranks of a host"] = f"{world.local_world_size}"
        fixes["the number of ranks of a host"] = "give equal slots, or use --parallel fsdp"
        if config.check_divergence and world.num_nodes in (None, 1):
            copies = "copies of the model, and --parallel hsdp has one on one host"
            raise mpiddp.UserError(f"--check-divergence compares {copies}.", fix="leave one out")
    by_rank = gathered(compared)
    for name in compared:
        values = [of_rank.get(name) for of_rank in by_rank]
        if len(set(values)) > 1:
            ranks = {value: values.index(value) for value in values}
            listed = ", ".join(f"{value} (rank {rank})" for value, rank in ranks.items())
            fix = fixes.get(name, "give all ranks the same options")
            raise mpiddp.UserError(f"{name} differs: {listed}.", fix=fix)


def half_the_memory(options: argparse.Namespace, config: Config) -> str:
    """The options that keep the global batch, for a GPU whose memory is full."""
    place = " in the place of --batch-size" if options.batch_size else ""
    batch = f"--global-batch-size {config.global_batch_size}"
    passes = f"{batch} --grad-accum-steps {2 * config.grad_accum_steps}{place}"
    return f"for the same global batch in half of the memory: {passes}"


# --- files ---


def table(summary: Mapping[str, Any], config: Config) -> str:
    """A line for each value of the summary. The training loss cannot be compared with a loss of tests."""
    shown = {name: f"{value:.4g}" for name, value in summary.items() if isinstance(value, float)}
    hosts = ", ".join(f"{name} {count}" for name, count in summary["hosts"].items())
    lines = {**summary, **shown, "hosts": hosts}
    smoothing = f"label smoothing {config.label_smoothing:g}"
    lines["train_loss"] = f"{lines['train_loss']}  (augmented images, {smoothing})"
    rows = {name: "-" if value is None else value for name, value in lines.items()}
    return "\n".join(f"{name:<18} {value}" for name, value in rows.items())


def steps_in(summary: Path) -> Any:
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        return json.loads(summary.read_bytes())["steps"]


def save_json(path: Path, values: Mapping[str, Any]) -> None:
    """Replace the file, or on an error leave the existing one. NaN and infinities become null."""
    bad = {name for name, value in values.items() if value in (math.inf, -math.inf) or value != value}
    finite = {name: None if name in bad else value for name, value in values.items()}
    replace_file(path, f"{json.dumps(finite, indent=1)}\n".encode())


if __name__ == "__main__":
    sys.exit(main())
