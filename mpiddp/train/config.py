"""The configuration of a run: the options with every default resolved.

Defaults that depend on the number of ranks and on the device are resolved here. config.json and every
checkpoint contain the result, and a run that resumes is compared with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mpiddp.errors import UserError
from mpiddp.runtime.launcher.announcement import Announced
from mpiddp.text import counted
from mpiddp.train.architectures import ARCHITECTURES, stem_of
from mpiddp.train.data.datasets import DATASETS
from mpiddp.train.option_parser import Option, flag_of, options_of
from mpiddp.train.options import ON_CPU, ON_GPU, TrainOptions
from mpiddp.world import World

IMAGES_PER_PASS = 2  # the minimum that BatchNorm can normalize

_WITHOUT = {
    "max_shift": 4,
    "low_res_epochs": 0,
    "optimizer": "sgd",
}  # what the versions without an option did


@dataclass(frozen=True, kw_only=True)
class TrainConfig(TrainOptions):
    """Every setting of a run. None is a value here: no limit, no file, or the data set's default."""

    arch: str
    batch_size: int
    global_batch_size: int
    epochs: int
    low_res_epochs: int
    max_shift: int
    optimizer: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Change:
    """An option whose value differs between a checkpoint and the run that resumes from it."""

    flag: str
    before: Any
    now: Any
    refusal: str  # what of the checkpoint contradicts the new value; "" if a resume may change it

    def __str__(self) -> str:
        reason = f" ({self.refusal})" if self.refusal else ""
        return f"{self.flag} {self.before}, now {self.now}{reason}"


def changed_options(saved: Mapping[str, Any], config: TrainConfig) -> list[Change]:
    """The options with other values than in `saved`, a config.json, that matter to the steps or are refused.

    Paths, the split of the same global batch, settings that change weights by rounding at most, and
    intervals of logging and saving are none of them.
    """
    before, now = {**_WITHOUT, **saved}, config.as_json()
    return [
        Change(
            flag_of(name, about),
            _as_flag(about, before.get(name)),
            _as_flag(about, now[name]),
            about.fixed,
        )
        for name, about in options_of(TrainOptions).items()
        if (about.noted or about.fixed) and _meaning(name, before) != _meaning(name, now)
    ]


def _as_flag(about: Option, value: Any) -> Any:
    """The value of an option as its flag means it: --no-lr-scaling is True where `lr_scaling` is False."""
    return not value if about.flag.startswith("--no-") else value


def _meaning(name: str, values: Mapping[str, Any]) -> Any:
    """What the value of an option stands for: a default may be spelled out in the resumed run."""
    spec, arch = DATASETS.get(str(values.get("dataset"))), str(values.get("arch"))
    pixels = values.get("image_size") or (spec and spec.size)
    if name == "image_size":
        return pixels
    if name == "stem" and pixels and arch in ARCHITECTURES:
        return stem_of(arch, values.get("stem", "auto"), pixels)
    return values.get(name)


def keep_global_batch(
    options: TrainOptions, before: Announced | None, world_size: int
) -> TrainOptions:
    """The options as written, but with the global batch of an earlier attempt on other ranks.

    The number of backward passes grows until no pass is larger than before, because each rank has the
    same memory as before. Passes may become larger only where they would otherwise be single images,
    which BatchNorm cannot normalize.
    """
    if before is None or before.world_size == world_size:
        return options
    images = before.global_batch_size
    per_pass = -(-images // (options.grad_accum_steps * before.world_size))
    passes = -(-images // (per_pass * world_size))
    passes = max(1, min(passes, images // (IMAGES_PER_PASS * world_size)))
    return replace(
        options,
        batch_size=None,
        global_batch_size=images,
        uneven=True,
        grad_accum_steps=passes,
    )


def resolve_defaults(
    options: TrainOptions, world: World, *, on_gpu: bool, has_bf16: bool
) -> TrainConfig:
    """Fill in the defaults that depend on the machines: a small run on CPUs, a larger one on GPUs.

    Raises:
        UserError: the global batch cannot be split evenly, or the device does not support an option.
    """
    defaults = ON_GPU if on_gpu else ON_CPU
    batch_size, global_batch_size = _resolve_batch(options, world.world_size, defaults.batch_size)
    epochs = options.epochs or defaults.epochs
    if options.warmup_epochs is not None and options.warmup_epochs > epochs:
        raise UserError(
            f"--warmup-epochs {options.warmup_epochs:g} is more than --epochs {epochs}: "
            "the learning rate would never reach its peak."
        )
    low_res_epochs = options.low_res_epochs
    if low_res_epochs is None:
        low_res_epochs = round(defaults.low_res * epochs)
    if low_res_epochs > epochs:
        raise UserError(
            f"--low-res-epochs {low_res_epochs} is more than --epochs {epochs}. Use {epochs} or "
            "less."
        )
    arch = options.arch or defaults.arch
    is_usual = not on_gpu and options.parallel == "ddp" and options.amp != "fp16"
    optimizer = options.optimizer or (ARCHITECTURES[arch].optimizer if is_usual else "sgd")
    amp = options.amp
    if amp == "auto":
        amp = "bf16" if has_bf16 else "off"
    resolved = {
        "arch": arch,
        "batch_size": batch_size,
        "global_batch_size": global_batch_size,
        "epochs": epochs,
        "low_res_epochs": low_res_epochs,
        "max_shift": defaults.max_shift if options.max_shift is None else options.max_shift,
        "optimizer": optimizer,
        "amp": amp,
        # fully_shard accepts contiguous parameters only.
        "channels_last": options.channels_last and options.parallel == "ddp",
    }
    return TrainConfig(**{**vars(options), **resolved})


def _resolve_batch(options: TrainOptions, world_size: int, default: int) -> tuple[int, int]:
    """The images in a rank's largest backward pass, and in a step over all ranks."""
    passes = options.grad_accum_steps * world_size
    if options.global_batch_size is None:
        batch_size = options.batch_size or default
        return batch_size, batch_size * passes
    batch_size, rest = divmod(options.global_batch_size, passes)
    if rest == 0:
        return batch_size, options.global_batch_size
    if not options.uneven:
        raise UserError(_not_divisible(options, batch_size, world_size))
    if batch_size < IMAGES_PER_PASS:
        raise UserError(
            f"--global-batch-size {options.global_batch_size} gives some of {world_size} ranks "
            "fewer than two images per pass; BatchNorm needs two. Use "
            f"{IMAGES_PER_PASS * passes} or more."
        )
    return batch_size + 1, options.global_batch_size


def _not_divisible(options: TrainOptions, batch_size: int, world_size: int) -> str:
    """The error, with the two nearest global batches that divide."""
    passes = options.grad_accum_steps * world_size
    divisor = counted(world_size, "rank")
    if options.grad_accum_steps > 1:
        divisor += f" × {options.grad_accum_steps} accumulation steps = {passes}"
    proposals = {max(1, batch_size) * passes, (batch_size + 1) * passes}
    or_uneven = ", or --uneven" if batch_size >= IMAGES_PER_PASS else ""
    return (
        f"--global-batch-size {options.global_batch_size} is not divisible by {divisor}. "
        f"Use {' or '.join(map(str, sorted(proposals)))}{or_uneven}."
    )


def out_dir(config: TrainConfig, time: str) -> Path:
    return Path(config.out) if config.out else Path("runs") / f"{time}-{config.arch}"


def resume_args(config: TrainConfig, out: Path) -> list[str]:
    """The options that the same command also needs to resume this run, which writes to `out`.

    A --resume that names another run counts until this run has a checkpoint, so it stays.
    """
    out_option = [] if config.out else ["--out", str(out)]
    goes_back = Path(config.resume).resolve().parent == (out / "checkpoints").resolve()
    return (
        [*out_option, "--resume", "auto"] if config.resume == "never" or goes_back else out_option
    )
