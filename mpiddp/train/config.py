"""The settings of a training. Each is one field: its type, its option of the command line, and its help.

    config = resolve(parse(["--use_syn", "--arch=resnet152"]), world_size, device)

config.json contains them, and a run that resumes is compared with them. `resolve` fills in the defaults that
depend on the machines. It imports torch; --help and the errors of options appear without.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from math import inf, nan
from typing import TYPE_CHECKING, Any, NoReturn

import mpiddp
from mpiddp.errors import UserError

if TYPE_CHECKING:
    import torch

ARCHS = (
    *("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"),
    *("resnet20", "resnet32", "resnet44", "resnet56", "resnet110", "whitened_resnet8"),
)
IMAGES_PER_PASS = 2  # the minimum that BatchNorm can normalize
_LARGE_IMAGE = 64  # pixels: those below are what CIFAR's stems are for
# The defaults by the device. A CPU without instructions for bf16 trains for fewer epochs, so both kinds take
# less than four minutes: docs/evidence/accuracy.md.
# fmt: off
_ON_CPU = {"batch_size": 128, "epochs": 5, "low_res": 0.75, "max_shift": 2}
_ON_CPU_WITH_BF16 = {**_ON_CPU, "epochs": 12}
_ON_GPU = {"batch_size": 256, "epochs": 30, "low_res": 0.0, "max_shift": 4}
# fmt: on

# A resume may not change these: they decide what the steps of the checkpoint have done.
FIXED = (
    *("arch", "stem", "dataset", "use_syn", "image_size", "global_batch_size", "steps_per_epoch"),
    *("optimizer", "seed"),
)
# The length of a run, its files and its checks, which a benchmark of single steps does not have.
OF_RUN = (
    *("epochs", "steps_per_epoch", "resume", "save_every", "keep", "log_to", "stop_at_step"),
    *("check_determinism", "check_divergence"),
)


# --- values of options ---


def count(low: int, metavar: str = "N") -> dict[str, Any]:
    """The keywords of an option that takes a whole number from `low` on."""

    def whole(text: str) -> int:
        if not re.fullmatch("[0-9]{1,12}", text, re.ASCII) or int(text) < low:
            raise ArgumentTypeError(f"expected a whole number, {low} or more, not {text[:80]!r}")
        return int(text)

    return {"type": whole, "metavar": metavar}


def number(low: float, below: float = inf) -> Callable[[str], float]:
    """A parser for a number from `low` on."""
    limit = "" if below == inf else f" and less than {below:g}"

    def parsed(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = nan
        if not low <= value < below:
            raise ArgumentTypeError(
                f"expected a number of at least {low:g}{limit}, not {text[:80]!r}"
            )
        return value

    return parsed


def interval(text: str) -> str:
    """20 (steps), 30s, 10m or 1.5h: `mpiddp.Checkpoints` takes the text."""
    if not re.fullmatch(r"0*[1-9]\d{0,8}|(?=[0.]*[1-9])\d{1,6}(\.\d+)?[smh]", text, re.ASCII):
        raise ArgumentTypeError(
            f"expected steps, or a time such as 30s, 10m or 1h, not {text[:80]!r}"
        )
    return text


def path(text: str) -> str:
    """A path as written. An empty one usually comes from a shell variable that is not set."""
    if not text:
        raise ArgumentTypeError("expected a path, not an empty string")
    return text


def option(help: str, **keywords: Any) -> Any:
    """A field that is an option; `keywords` are argparse's. Without a default the user's silence is None."""
    return field(metadata={"help": help, **keywords})


# --- the settings ---

GROUPS = {  # of --help, by their first settings
    "arch": "model",
    "dataset": "data",
    "epochs": "schedule",
    "backend": "engine",
    "out": "run",
    "check_determinism": "checks",
}
_POSITIVE, _FRACTION, _SWITCH = number(1e-12), number(0, 1), "store_true"


# fmt: off
@dataclass(frozen=True)
class Config:
    """The settings of a training, resolved. `mpiddp train --help` lists them."""

    max_shift: int  # pixels by which CIFAR-10's images are shifted; it is no option

    arch: str = option(f"{', '.join(ARCHS)} (default: by the device)", choices=ARCHS, metavar="ARCH")
    stem: str = option("first layers (default: auto)",
                       choices=("auto", "imagenet", "cifar"), default="auto")

    dataset: str = option("(default: cifar10)", choices=("cifar10", "image-folder"), default="cifar10")
    data_dir: str | None = option("(default: $MPIDDP_DATA, else ~/.cache/mpiddp)", type=path, metavar="DIR")
    use_syn: bool = option("random images and labels in the data set's shape", action=_SWITCH)
    image_size: int = option("pixels of an image folder's images (default: 224)", **count(1))
    num_workers: int = option("processes that decode, per rank (default: a rank's cores)", **count(0))
    skip_bad_images: bool = option("go on without images that cannot be read", action=_SWITCH)
    batch_size: int = option("images per rank and pass (default: 128 on CPUs, 256 on GPUs)", **count(1))
    global_batch_size: int = option("images per step over all ranks; or --batch-size", **count(1))
    grad_accum_steps: int = option("backward passes per step (default: 1)", **count(1), default=1)

    epochs: int = option("(default: 5 on CPUs, 12 on those with bf16, 30 on GPUs)", **count(1))
    steps_per_epoch: int | None = option("end every epoch after this many steps", **count(1))
    low_res_epochs: int = option("first epochs, on smaller images (default: 3/4 of them on CPUs)",
                                **count(0))
    lr: float = option("peak for 256 images; scales with the batch (default: 0.4, of whitened_resnet8 0.25)",
                       type=_POSITIVE)
    schedule: str = option("learning rate (default: one-cycle)",
                           choices=("one-cycle", "cosine", "step", "constant"), default="one-cycle")
    optimizer: str = option("(default: muon for whitened_resnet8 on CPUs, else sgd)", choices=("sgd", "muon"))
    momentum: float = option("Nesterov's (default: 0.9)", type=_FRACTION, default=0.9)
    weight_decay: float = option("(default: 5e-4 for cifar10, 1e-4 for image folders)", type=_FRACTION)
    label_smoothing: float = option("of the training loss (default: 0, of whitened_resnet8 0.1)",
                                    type=_FRACTION)
    zero_init: bool = option("each block of the model begins as its shortcut", action=_SWITCH)
    clip_grad_norm: float | None = option("limit of the gradients' norm", type=_POSITIVE, metavar="NORM")
    ema_decay: float | None = option("average the weights, and evaluate the average", type=_FRACTION)
    ema_steps: int = option("steps between updates of the average (default: 32)", **count(1), default=32)

    backend: str | None = option("(default: nccl with a GPU, else gloo)", choices=("nccl", "gloo"))
    amp: str = option("mixed precision (default: auto)",
                      choices=("auto", "bf16", "fp16", "off"), default="auto")
    parallel: str = option("copies or shards (default: ddp)", choices=("ddp", "fsdp", "hsdp"), default="ddp")
    sync_bn: bool = option("BatchNorm statistics over all ranks", action=_SWITCH)
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
    log_to: str | None = option("also record the run for this viewer", choices=("tensorboard",))
    stop_at_step: int | None = option("save after this step and exit with code 75", **count(1, "STEP"))

    check_determinism: int | None = option("compare two runs of 10 steps, or N",
                                           nargs="?", const=10, **count(1))
    check_divergence: int | None = option("how often to compare the ranks", **count(1, "STEPS"))
# fmt: on

    def image_side(self, epoch: int) -> int:
        """The height and width of an epoch's images, in pixels.

        The first two thirds of the low-resolution epochs have 1/2 of the size, the others 3/4.
        """
        if epoch >= self.low_res_epochs:
            return self.image_size
        quarters = 2 if epoch < self.low_res_epochs * 2 / 3 else 3
        return max(1, self.image_size * quarters // 4)


# --- from the command line ---


class _Parser(argparse.ArgumentParser):
    """Raises its errors as UserError."""

    def error(self, message: str) -> NoReturn:
        unknown = re.fullmatch(r"unrecognized arguments: (--[^\s=]+).*", message, re.DOTALL)
        known, near = list(self._option_string_actions), list[str]()
        if unknown:  # an option cut short, or a typo
            near = [each for each in known if each.startswith(unknown[1])]
            near += difflib.get_close_matches(unknown[1], known, cutoff=0.8)
        hint = f' Did you mean "{near[0]}"?' if near else ""
        raise UserError(f"{self.prog}: {message}.{hint} See: {self.prog} --help")


def option_parser() -> argparse.ArgumentParser:
    """The parser of every option, with dashes."""
    parser = _Parser(
        prog="mpiddp train",
        usage="%(prog)s [options]\n\n"
        "  mpiddp launch -n 2 -m mpiddp train --epochs 2 --out runs/a\n"
        "  mpiddp train --use-syn --arch resnet20 --steps-per-epoch 10",
        description="Train a ResNet, as one rank of a job or alone.",
        allow_abbrev=False,
    )
    group = parser.add_argument_group()
    for each in fields(Config):
        if each.name in GROUPS:
            group = parser.add_argument_group(GROUPS[each.name])
        if each.metadata:
            group.add_argument(f"--{each.name.replace('_', '-')}", **each.metadata)
    return parser


def parse(argv: list[str]) -> Namespace:
    """The options as written; None where the user has set none. Raises UserError."""
    # --use_syn=1 becomes --use-syn=1; the value keeps its underscores.
    dashed = [re.sub("^--[^=]+", lambda name: name[0].replace("_", "-"), each) for each in argv]
    options = option_parser().parse_args(dashed)
    _refuse_contradictions(options)
    return options


def _refuse_contradictions(options: Namespace) -> None:
    sharded, is_sharded = f"--parallel {options.parallel}", options.parallel != "ddp"
    resumes = options.resume != "auto"
    for one, other, are_given in (
        ("--batch-size", "--global-batch-size", options.batch_size and options.global_batch_size),
        ("--check-determinism", "--resume PATH", options.check_determinism and resumes),
        ("--compile", sharded, is_sharded and options.compile == "on"),
        ("--optimizer muon", sharded, is_sharded and options.optimizer == "muon"),
        ("--sync-bn", sharded, is_sharded and options.sync_bn),
        ("--check-divergence", sharded, options.parallel == "fsdp" and options.check_divergence),
    ):
        if are_given:
            raise UserError(f"{one} and {other} are mutually exclusive. Leave one out.")
    if options.image_size and options.dataset != "image-folder":
        raise UserError("--image-size applies to image folders only. Leave it out.")


# --- the defaults of these machines ---


def resolve(options: Namespace, world_size: int, device: torch.device) -> Config:
    """The configuration that these options of `parse` have here. Raises UserError if they cannot be met."""
    import torch

    from mpiddp.train.muon import fast_dtype
    from mpiddp.train.resnet import ARCHITECTURES

    given = {name: value for name, value in vars(options).items() if value not in (None, "auto")}
    on_cpu, is_ddp = device.type == "cpu", options.parallel == "ddp"
    is_folder = options.dataset == "image-folder"
    image_size = (options.image_size or 224) if is_folder else 32
    is_large = image_size >= _LARGE_IMAGE
    amp = given.get("amp") or ("bf16" if fast_dtype(device) is torch.bfloat16 else "off")
    usual: dict[str, Any] = _ON_GPU
    if on_cpu:
        usual = _ON_CPU_WITH_BF16 if amp == "bf16" else _ON_CPU
    arch = options.arch or ("whitened_resnet8" if on_cpu and not is_folder else "resnet18")
    is_whitened = arch == "whitened_resnet8"
    if is_whitened and (is_folder or options.stem != "auto"):
        raise UserError(
            f"{arch} is for CIFAR-10, and has a stem of its own. Name another --arch, for example resnet18."
        )
    if is_whitened:
        stem = "whitened"
    elif options.arch:  # as in torchvision, or in its paper
        stem = ARCHITECTURES[arch].stem
    else:  # torchvision's stem halves 32×32 images twice before the first block
        stem = "cifar"
    epochs = options.epochs or usual["epochs"]
    ranks_on_host = mpiddp.World.from_env().local_world_size or 1
    by_default = {
        "arch": arch,
        "stem": "imagenet" if is_large else stem,
        "max_shift": usual["max_shift"],
        "image_size": image_size,
        "num_workers": max(1, len(os.sched_getaffinity(0)) // ranks_on_host),
        "epochs": epochs,
        "low_res_epochs": min(epochs - 1, round(usual["low_res"] * epochs)),  # the last one is whole
        "optimizer": "muon" if is_whitened and on_cpu and is_ddp and amp != "fp16" else "sgd",
        "lr": 0.25 if is_whitened else 0.4,
        "label_smoothing": 0.1 if is_whitened else 0.0,
        # torchvision's for ImageNet, and the usual one for CIFAR-10
        "weight_decay": 1e-4 if is_folder else 5e-4,
        "amp": amp,
        # worth its minute for large images on a GPU
        "compile": "on" if device.type == "cuda" and is_large and is_ddp else "off",
    }
    split = split_batch(options, mpiddp.announced(), world_size, usual["batch_size"])
    config = Config(**{**vars(options), **by_default, **given, **split})
    if config.low_res_epochs > epochs:
        raise UserError(
            f"--low-res-epochs {config.low_res_epochs} is more than --epochs {epochs}. Use {epochs} or less."
        )
    # A stem halves the sides of the images up to two times, and each group of blocks but the first once.
    halvings = 4 if is_whitened else 2 * (config.stem == "imagenet") + len(ARCHITECTURES[arch].depths) - 1
    side = config.image_side(epoch=0)
    per_pass = config.batch_size * (world_size if config.sync_bn else 1)
    if per_pass == 1 and side <= 1 << halvings:
        raise UserError(
            f"--batch-size 1 leaves BatchNorm one value: {arch} with the {config.stem} stem reduces such "
            "images to one pixel. Use 2 or more."
        )
    return config


def split_batch(
    options: Namespace, before: mpiddp.Announced | None, world_size: int, default: int
) -> dict[str, int]:
    """The images of a step over all ranks, its backward passes, and the images of the largest one of a rank.

    On other ranks than those of an earlier attempt (`before`) the global batch stays. The number of passes
    grows until none is larger than before, because each rank has the same memory as before. Passes may become
    larger only where they would otherwise be single images, which BatchNorm cannot normalize.
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
        raise UserError(
            f"--global-batch-size {images} gives some of {world_size} ranks fewer than two images per pass; "
            f"BatchNorm needs two. Use {IMAGES_PER_PASS * parts} or more."
        )
    return {
        "global_batch_size": images,
        "grad_accum_steps": passes,
        "batch_size": -(-images // parts),
    }
