"""The settings of a training. Each is one field: its type, its option of the command line, and its help.

config.json and every checkpoint contain them, and a run that resumes is compared with them. `resolve` fills
in the defaults that depend on the machines. It imports torch; --help and errors appear without.
"""

from __future__ import annotations

import os
import re
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mpiddp
from mpiddp.errors import UserError

if TYPE_CHECKING:
    import torch

ARCHS = (
    *("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"),
    *("resnet20", "resnet32", "resnet44", "resnet56", "resnet110", "wide_resnet14_2"),
)
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune")  # torch.compile's own
SINKS = ("tensorboard", "wandb", "mlflow", "trackio")

IMAGES_PER_PASS = 2  # the minimum that BatchNorm can normalize
_SMALL_IMAGE = 64  # pixels: what CIFAR's stems are for
# Small and quick on CPUs: a few epochs learn more from images that change little. On GPUs, only the CIFAR
# stem leaves enough of 32×32 images: torchvision's halves them twice before the first block.
# fmt: off
_ON_CPU = {"arch": "wide_resnet14_2", "stem": "half", "batch_size": 64,
           "epochs": 7, "low_res": 0.5, "max_shift": 2}
_ON_GPU = {"arch": "resnet18", "stem": "cifar", "batch_size": 256,
           "epochs": 30, "low_res": 0.0, "max_shift": 4}
# fmt: on

# A resume may not change these: they decide what the steps of the checkpoint have done.
FIXED = (
    *("arch", "stem", "dataset", "use_syn", "image_size", "global_batch_size", "steps_per_epoch"),
    *("optimizer", "seed"),
)
# With another value of these, the steps after a resume differ from those of one run.
NOTED = (
    *("epochs", "low_res_epochs", "lr", "schedule", "clip_grad_norm", "amp", "sync_bn"),
    *("grad_compression", "momentum", "weight_decay", "label_smoothing", "ema_decay", "ema_steps"),
)
# The length of a run, its files and its checks, which a benchmark of single steps does not have.
OF_RUN = (
    *("epochs", "steps_per_epoch", "resume", "save_every", "keep", "log_to", "per_rank_log"),
    *("stop_at_step", "check_determinism", "check_divergence"),
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


def tools(text: str) -> str:
    """Names of SINKS, separated by commas."""
    given = list(dict.fromkeys(text.split(",")))
    if unknown := [name for name in given if name not in SINKS]:
        raise ArgumentTypeError(f"expected some of {', '.join(SINKS)}, not {unknown[0][:80]!r}")
    return ",".join(given)


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
    stem: str = option("of the model", choices=("auto", "imagenet", "cifar", "half"), default="auto")
    weights: str | None = option("a torchvision state_dict, or a run, to start from",
                                 type=path, metavar="PATH")

    dataset: str = option("(default: cifar10)", choices=("cifar10", "image-folder"), default="cifar10")
    data_dir: str | None = option("(default: $MPIDDP_DATA, else ~/.cache/mpiddp)", type=path, metavar="DIR")
    use_syn: bool = option("random images and labels in the data set's shape", action=_SWITCH)
    image_size: int = option("pixels of an image folder's images (default: 224)", **count(1))
    num_workers: int = option("processes that decode, per rank (default: a rank's cores)", **count(0))
    skip_bad_images: bool = option("go on without images that cannot be read", action=_SWITCH)
    batch_size: int = option("images per rank and pass (default: 64 on CPUs, 256 on GPUs)", **count(1))
    global_batch_size: int = option("images per step over all ranks; or --batch-size", **count(1))
    grad_accum_steps: int = option("backward passes per step (default: 1)", **count(1), default=1)

    epochs: int = option("(default: 7 on CPUs, 30 on GPUs)", **count(1))
    steps_per_epoch: int | None = option("end every epoch after this many steps", **count(1))
    low_res_epochs: int = option("on 3/4 of the pixels (default: half of them on CPUs)", **count(0))
    lr: float = option("peak for 256 images; scales with the batch", type=_POSITIVE, default=0.4)
    schedule: str = option("learning rate (default: one-cycle)",
                           choices=("one-cycle", "cosine", "step", "constant"), default="one-cycle")
    optimizer: str = option("(default: muon for wide_resnet14_2 on CPUs, else sgd)", choices=("sgd", "muon"))
    momentum: float = option("Nesterov's (default: 0.9)", type=_FRACTION, default=0.9)
    weight_decay: float = option("(default: 5e-4 for cifar10, 1e-4 for image folders)", type=_FRACTION)
    label_smoothing: float = option("of the training loss (default: 0)", type=_FRACTION, default=0.0)
    zero_init: bool = option("each block of the model begins as its shortcut", action=_SWITCH)
    clip_grad_norm: float | None = option("limit of the gradients' norm", type=_POSITIVE, metavar="NORM")
    ema_decay: float | None = option("average the weights as torchvision, and score that", type=_FRACTION)
    ema_steps: int = option("between two updates of the average (default: 32)", **count(1), default=32)

    backend: str | None = option("(default: nccl with a GPU, else gloo)", choices=("nccl", "gloo"))
    amp: str = option("dtype", choices=("auto", "bf16", "fp16", "off"), default="auto")
    parallel: str = option("copies or shards", choices=("ddp", "fsdp", "hsdp"), default="ddp")
    sync_bn: bool = option("BatchNorm statistics over all ranks", action=_SWITCH)
    compile: str = option("(default: auto)", nargs="?", const="default",
                          choices=("auto", "off", *COMPILE_MODES), default="auto")
    grad_compression: str = option("of the all-reduce", choices=("off", "bf16"), default="off")
    seed: int = option("of weights, order and augmentation (default: 0)", **count(0), default=0)
    deterministic: bool = option("deterministic kernels, on GPUs too", action=_SWITCH)

    out: str | None = option("folder of the run (default: runs/<time>-<arch>)", type=path, metavar="DIR")
    resume: str = option("(default: auto)", type=path, metavar="auto|never|PATH", default="auto")
    save_every: str | None = option("20, 30s or 10m (default: per epoch)",
                                    type=interval, metavar="STEPS|TIME")
    keep: int = option("checkpoints to keep (default: 2)", **count(2), default=2)
    log_every: int = option("(default: 50)", **count(1, "STEPS"), default=50)
    log_to: str | None = option(f"also show the run in {', '.join(SINKS)}", type=tools, metavar="TOOLS")
    per_rank_log: bool = option("print the lines of mpirun tutorials, on every rank", action=_SWITCH)
    stop_at_step: int | None = option("save after this step and exit with code 75", **count(1, "STEP"))

    check_determinism: int | None = option("compare two runs of 10 steps, or N",
                                           nargs="?", const=10, **count(1))
    check_divergence: int | None = option("compare the ranks so often", **count(1, "STEPS"))
# fmt: on


def resolve(options: Namespace, world_size: int, device: torch.device) -> Config:
    """The configuration that these options of `parse` have here. Raises UserError if they cannot be met."""
    from mpiddp.train.resnet import ARCHITECTURES

    chosen = Namespace(**vars(options))
    defaults: dict[str, Any] = _ON_GPU if device.type != "cpu" else _ON_CPU
    _keep_global_batch(chosen, mpiddp.announced(), world_size)
    _split_batch(chosen, world_size, defaults["batch_size"])
    chosen.arch = options.arch or defaults["arch"]
    chosen.epochs = options.epochs or defaults["epochs"]
    if options.low_res_epochs is None:
        chosen.low_res_epochs = round(defaults["low_res"] * chosen.epochs)
    if chosen.low_res_epochs > chosen.epochs:
        raise UserError(
            f"--low-res-epochs {chosen.low_res_epochs} is more than --epochs {chosen.epochs}. Use "
            f"{chosen.epochs} or less."
        )
    chosen.max_shift = defaults["max_shift"]
    if options.num_workers is None:
        on_host = mpiddp.World.from_env().local_world_size or 1
        chosen.num_workers = max(1, len(os.sched_getaffinity(0)) // on_host)
    is_folder = options.dataset == "image-folder"
    chosen.image_size = (options.image_size or 224) if is_folder else 32
    if options.stem == "auto":  # a model that the user names is torchvision's, or of its paper
        own_stem = ARCHITECTURES[options.arch].stem if options.arch else defaults["stem"]
        chosen.stem = "imagenet" if chosen.image_size >= _SMALL_IMAGE else own_stem
    is_usual = device.type == "cpu" and options.parallel == "ddp" and options.amp != "fp16"
    own = ARCHITECTURES[chosen.arch].optimizer if is_usual else "sgd"
    chosen.optimizer = options.optimizer or own
    if options.amp == "auto":
        chosen.amp = "bf16" if _computes_in_bf16(device) else "off"
    if options.weight_decay is None:  # torchvision's for ImageNet, and the usual one for CIFAR-10
        chosen.weight_decay = 1e-4 if is_folder else 5e-4
    if options.compile == "auto":  # worth its minute for large images on a GPU
        is_large = chosen.image_size >= _SMALL_IMAGE and options.parallel == "ddp"
        chosen.compile = "default" if device.type == "cuda" and is_large else "off"
    return Config(**vars(chosen))


def _keep_global_batch(chosen: Namespace, before: mpiddp.Announced | None, ranks: int) -> None:
    """Keep the global batch of an earlier attempt on other ranks.

    The number of backward passes grows until no pass is larger than before, because each rank has the
    same memory as before. Passes may become larger only where they would otherwise be single images,
    which BatchNorm cannot normalize.
    """
    if before is None or before.world_size == ranks:
        return
    images = before.global_batch_size
    per_pass = -(-images // (chosen.grad_accum_steps * before.world_size))
    passes = -(-images // (per_pass * ranks))
    chosen.grad_accum_steps = max(1, min(passes, images // (IMAGES_PER_PASS * ranks)))
    chosen.batch_size, chosen.global_batch_size = None, images


def _split_batch(chosen: Namespace, world_size: int, default: int) -> None:
    """The images of a step over all ranks, and of a rank's largest backward pass."""
    passes = chosen.grad_accum_steps * world_size
    if chosen.global_batch_size is None:
        chosen.batch_size = chosen.batch_size or default
        chosen.global_batch_size = chosen.batch_size * passes
    elif chosen.global_batch_size < passes * (1 if chosen.global_batch_size % passes == 0 else 2):
        raise UserError(
            f"--global-batch-size {chosen.global_batch_size} gives some of {world_size} ranks fewer than "
            f"two images per pass; BatchNorm needs two. Use {IMAGES_PER_PASS * passes} or more."
        )
    chosen.batch_size = -(-chosen.global_batch_size // passes)


def _computes_in_bf16(device: torch.device) -> bool:
    """Whether bf16 is faster than fp32 on the device, not only possible."""
    if device.type == "cuda":
        import torch

        with torch.cuda.device(device):  # it asks about the current device
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # On x86, oneDNN emulates bf16 on every CPU with AVX-512, so read the CPU's flags instead.
    # On Arm the line is "Features", the flag "bf16".
    with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return not {"avx512_bf16", "bf16"}.isdisjoint(flags.split())
