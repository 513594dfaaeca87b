"""The settings of a training: the options of `mpiddp train` come in, and a Config goes out.

`parse` checks each option, and which exclude each other. `resolve` adds the recipe's value for each option that is
not given, for this data set, this device and this number of ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import mpiddp
from mpiddp.arguments import OneSentenceParser, common, flag_of, option, options_of, whole
from mpiddp.text import parse_interval, shown
from mpiddp.train import train as plain
from mpiddp.train.data import DATASETS
from mpiddp.train.resnet import ARCHITECTURES, ARCHS
from mpiddp.train.train import Recipe

IMAGES_PER_PASS = 2  # the minimum that BatchNorm can normalize
LARGE_IMAGE = 64  # pixels; CIFAR's stems are for smaller images


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
            raise mpiddp.UserError(
                f"{first} and {second} are mutually exclusive.", fix="leave one out"
            )
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
        raise mpiddp.UserError(
            "--sync-bn needs GPUs: torch's SyncBatchNorm has no kernels for CPUs."
        )
    # A stem halves the sides of the images up to two times, and each group of blocks but the first once.
    depths = 4 if is_whitened else len(ARCHITECTURES[arch].depths) - 1
    halvings = depths + 2 * (config.stem == "imagenet")
    per_pass = config.batch_size * (world_size if config.sync_bn else 1)
    if per_pass == 1 and min(config.sides or (image_size,)) <= 1 << halvings:
        one_pixel = f"{arch} with the {config.stem} stem reduces such images to one pixel"
        sentence = f"--batch-size 1 leaves BatchNorm one value: {one_pixel}."
        raise mpiddp.UserError(sentence, fix="--batch-size 2, or more")
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
        few = (
            f"gives some of {world_size} ranks fewer than two images per pass; BatchNorm needs two"
        )
        fix = f"--global-batch-size {IMAGES_PER_PASS * parts}, or more"
        raise mpiddp.UserError(f"--global-batch-size {images} {few}.", fix=fix)
    return {
        "global_batch_size": images,
        "grad_accum_steps": passes,
        "batch_size": -(-images // parts),
    }


def fixed_of(config: Config) -> dict[str, Any]:
    """The options that past steps depend on."""
    names = (*plain.FIXED, "use_syn", "global_batch_size", "steps_per_epoch")
    return {flag_of(name): getattr(config, name) for name in names}
