"""The configuration of a training: each setting with its type, and the defaults that depend on the machines.

config.json and every checkpoint contain it, and a run that resumes is compared with it.
"""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import mpiddp
from mpiddp.errors import UserError
from mpiddp.train.resnet import ARCHITECTURES

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


@dataclass(frozen=True)
class Config:
    """The settings of a training. `mpiddp train --help` tells what each of them means."""

    arch: str
    stem: str
    weights: str | None
    dataset: str
    data_dir: str | None
    use_syn: bool
    image_size: int
    max_shift: int  # pixels by which CIFAR-10's images are shifted
    skip_bad_images: bool
    num_workers: int  # processes that decode, of each rank
    batch_size: int  # images of a rank's largest backward pass
    global_batch_size: int
    grad_accum_steps: int
    epochs: int
    steps_per_epoch: int | None
    low_res_epochs: int
    lr: float
    schedule: str
    optimizer: str
    momentum: float  # Nesterov's
    weight_decay: float  # of convolutions and the last layer's matrix
    label_smoothing: float
    zero_init: bool
    clip_grad_norm: float | None
    ema_decay: float | None
    ema_steps: int
    backend: str | None
    amp: str
    parallel: str
    sync_bn: bool
    compile: str
    grad_compression: str
    seed: int
    deterministic: bool
    out: str | None
    resume: str
    save_every: str | None
    keep: int
    log_every: int
    log_to: str | None
    per_rank_log: bool
    stop_at_step: int | None
    check_determinism: int | None
    check_divergence: int | None


def resolve(options: Namespace, world_size: int, device: torch.device) -> Config:
    """The configuration that these options of `parse` have here. Raises UserError if they cannot be met."""
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
        with torch.cuda.device(device):  # it asks about the current device
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # On x86, oneDNN emulates bf16 on every CPU with AVX-512, so read the CPU's flags instead.
    # On Arm the line is "Features", the flag "bf16".
    with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return not {"avx512_bf16", "bf16"}.isdisjoint(flags.split())
