"""The configuration of a run: the options, with the defaults that depend on the ranks and the device.

config.json and every checkpoint contain it, and a run that resumes is compared with it.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

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


def resolve(options: Namespace, world_size: int, device: torch.device) -> Namespace:
    """The options with the defaults that depend on the machines. Raises UserError if they cannot be met."""
    config = Namespace(**vars(options))
    defaults: dict[str, Any] = _ON_GPU if device.type != "cpu" else _ON_CPU
    _keep_global_batch(config, mpiddp.announced(), world_size)
    _split_batch(config, world_size, defaults["batch_size"])
    config.arch = options.arch or defaults["arch"]
    config.epochs = options.epochs or defaults["epochs"]
    if options.low_res_epochs is None:
        config.low_res_epochs = round(defaults["low_res"] * config.epochs)
    if config.low_res_epochs > config.epochs:
        raise UserError(
            f"--low-res-epochs {config.low_res_epochs} is more than --epochs {config.epochs}. Use "
            f"{config.epochs} or less."
        )
    config.max_shift = defaults["max_shift"]  # pixels by which CIFAR-10's images are shifted
    is_folder = options.dataset == "image-folder"
    config.image_size = (options.image_size or 224) if is_folder else 32
    if options.stem == "auto":  # a model that the user names is torchvision's, or of its paper
        own_stem = ARCHITECTURES[options.arch].stem if options.arch else defaults["stem"]
        config.stem = "imagenet" if config.image_size >= _SMALL_IMAGE else own_stem
    is_usual = device.type == "cpu" and options.parallel == "ddp" and options.amp != "fp16"
    own = ARCHITECTURES[config.arch].optimizer if is_usual else "sgd"
    config.optimizer = options.optimizer or own
    if options.amp == "auto":
        config.amp = "bf16" if _computes_in_bf16(device) else "off"
    config.channels_last = options.parallel == "ddp"  # fully_shard accepts contiguous ones only
    return config


def memory_format(config: Namespace) -> torch.memory_format:
    """The layout of the images and of the model."""
    return torch.channels_last if config.channels_last else torch.contiguous_format


def _keep_global_batch(config: Namespace, before: mpiddp.Announced | None, ranks: int) -> None:
    """Keep the global batch of an earlier attempt on other ranks.

    The number of backward passes grows until no pass is larger than before, because each rank has the
    same memory as before. Passes may become larger only where they would otherwise be single images,
    which BatchNorm cannot normalize.
    """
    if before is None or before.world_size == ranks:
        return
    images = before.global_batch_size
    per_pass = -(-images // (config.grad_accum_steps * before.world_size))
    passes = -(-images // (per_pass * ranks))
    config.grad_accum_steps = max(1, min(passes, images // (IMAGES_PER_PASS * ranks)))
    config.batch_size, config.global_batch_size = None, images


def _split_batch(config: Namespace, world_size: int, default: int) -> None:
    """The images of a step over all ranks, and of a rank's largest backward pass."""
    passes = config.grad_accum_steps * world_size
    if config.global_batch_size is None:
        config.batch_size = config.batch_size or default
        config.global_batch_size = config.batch_size * passes
    elif config.global_batch_size < passes * (1 if config.global_batch_size % passes == 0 else 2):
        raise UserError(
            f"--global-batch-size {config.global_batch_size} gives some of {world_size} ranks fewer than "
            f"two images per pass; BatchNorm needs two. Use {IMAGES_PER_PASS * passes} or more."
        )
    config.batch_size = -(-config.global_batch_size // passes)


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


def gathered(value: Any) -> list[Any]:
    """The values of all ranks, by rank: [world_size]. A collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def require_equal(what: str, value: str, hint: str) -> None:
    """Raise UserError unless the values of all ranks are equal. A collective."""
    values = gathered(value)
    if len(set(values)) > 1:
        found = ", ".join(f"{each} (rank {values.index(each)})" for each in dict.fromkeys(values))
        raise UserError(f"{what} differs: {found}. {hint}")


def resume_args(config: Namespace, out: Path) -> list[str]:
    """The options that the same command also needs to resume this run, which writes to `out`.

    A --resume that names another run counts until this run has a checkpoint, so it stays.
    """
    args = [] if config.out else ["--out", str(out)]
    goes_back = Path(config.resume).resolve().parent == (out / "checkpoints").resolve()
    return [*args, "--resume", "auto"] if config.resume == "never" or goes_back else args
