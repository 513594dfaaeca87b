"""The options of `mpiddp train`: parsed, checked and frozen.

What can only be known with the others (how many ranks, which device) is filled in by `settle`.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from mpiddp.arguments import DefaultsShown, whole
from mpiddp.checkpoints.save_schedule import Interval, parse_interval
from mpiddp.errors import UserError
from mpiddp.runtime.arguments import RankParser
from mpiddp.text import counted
from mpiddp.train.schedule import SCHEDULES
from mpiddp.world import World

DATASETS = ("cifar10", "fashion-mnist", "image-folder")
STEMS = ("auto", "imagenet", "cifar")
ARCHS = (  # the keys of resnet.ARCHS, which --help need not import torch for
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnet20",
    "resnet32",
    "resnet44",
    "resnet56",
    "resnet110",
)
AMP = ("auto", "bf16", "fp16", "off")
COMPRESSIONS = ("off", "bf16", "fp16", "powersgd")
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune")  # torch.compile's own


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides a run. None means: chosen by `settle`, or by the data set."""

    arch: str | None
    stem: str
    weights: str | None
    dataset: str
    data_dir: str | None
    use_syn: bool
    image_size: int | None
    num_workers: int
    cache: str
    batch_size: int | None  # images per rank and backward pass, the largest
    global_batch_size: int | None
    uneven: bool
    grad_accum_steps: int
    keep_tail: bool
    epochs: int | None
    steps_per_epoch: int | None
    lr: float
    lr_scaling: bool
    schedule: str
    warmup_epochs: float | None
    momentum: float
    weight_decay: float
    label_smoothing: float
    sync_bn: bool
    amp: str
    channels_last: bool
    compile: str  # "off" or one of COMPILE_MODES
    bucket_mb: int  # MiB of gradients that travel together
    grad_compression: str
    seed: int
    deterministic: bool
    backend: str | None
    timeout: float  # seconds
    out: str | None
    resume: str
    go_on: bool
    save_every: Interval | None  # None: once an epoch
    keep: int
    on_save_error: str
    log_every: int  # steps
    stop_at_step: int | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


# What may differ between a checkpoint and the run that continues it: where things lie, how often is
# logged, what changes weights by rounding at most, and how the same global batch is dealt, which
# changes nothing but the images that BatchNorm sees together.
FREE_TO_CHANGE = frozenset(
    {
        "batch_size",
        "uneven",
        "grad_accum_steps",
        "num_workers",
        "cache",
        "data_dir",
        "weights",
        "backend",
        "timeout",
        "out",
        "resume",
        "go_on",
        "save_every",
        "keep",
        "on_save_error",
        "log_every",
        "stop_at_step",
        "compile",
        "bucket_mb",
        "channels_last",
        "deterministic",
    }
)


def differences(saved: dict[str, Any], config: TrainConfig) -> list[str]:
    """What of `saved` (a config.json) another run than `config` would be: "--lr 0.1, now 0.2"."""
    names = [field.name for field in fields(config) if field.name not in FREE_TO_CHANGE]
    return [
        f"--{name.replace('_', '-')} {saved.get(name)}, now {getattr(config, name)}"
        for name in names
        if saved.get(name) != getattr(config, name)
    ]


def parse(argv: list[str]) -> TrainConfig:
    """The options as written. --use_syn and --use-syn are the same option.

    Raises:
        UserError: unknown options, or values out of range.
    """
    values = vars(_parser().parse_args([_dashed(word) for word in argv]))
    values.pop("local_rank")
    config = TrainConfig(**values)
    if config.batch_size and config.global_batch_size:
        raise UserError("--batch-size and --global-batch-size exclude each other: name one.")
    if config.keep_tail and config.sync_bn:
        raise UserError(
            "--keep-tail and --sync-bn exclude each other: some ranks have no images in the tail."
        )
    return config


def check_options(argv: list[str]) -> str:
    """For a launcher, before anything starts: refuses bad options; the backend that good ones ask for.

    Raises:
        UserError: as `parse`.
    """
    return parse(argv).backend or "auto"


def settle(config: TrainConfig, world: World, *, on_gpu: bool, has_bf16: bool) -> TrainConfig:
    """Fill in what depends on the machines: a small, quick run on CPUs, a larger one on GPUs.

    Raises:
        UserError: a global batch that cannot be dealt evenly, or what the device cannot do.
    """
    if config.sync_bn and not on_gpu:
        raise UserError("--sync-bn needs GPUs: torch has no SyncBatchNorm for CPUs. Leave it out.")
    batch_size, accum, world_size = config.batch_size, config.grad_accum_steps, world.world_size
    if config.global_batch_size is not None:
        batch_size, rest = divmod(config.global_batch_size, accum * world_size)
        if rest and config.uneven and batch_size > 1:  # BatchNorm wants two images everywhere
            batch_size += 1
        elif rest and config.uneven:
            raise UserError(
                f"--global-batch-size {config.global_batch_size} leaves some of {world_size} ranks "
                f"fewer than two images a pass, and BatchNorm wants two: {2 * accum * world_size} or "
                "more would do."
            )
        elif rest or not batch_size:
            unit = accum * world_size
            fitting = {max(1, batch_size) * unit, (batch_size + 1) * unit}
            divisor = counted(world_size, "rank")
            if accum > 1:
                divisor += f" × {accum} accumulation steps = {unit}"
            raise UserError(
                f"--global-batch-size {config.global_batch_size} does not divide by {divisor}: "
                f"{' or '.join(map(str, sorted(fitting)))} would."
            )
    elif batch_size is None:
        batch_size = 256 if on_gpu else 64
    epochs = config.epochs or (30 if on_gpu else 4)
    if config.warmup_epochs is not None and config.warmup_epochs > epochs:
        raise UserError(
            f"--warmup-epochs {config.warmup_epochs:g} is more than --epochs {epochs}: "
            "the learning rate would never get where it is to go."
        )
    amp = config.amp
    if amp == "auto":
        amp = "bf16" if has_bf16 else "off"
    return replace(
        config,
        arch=config.arch or ("resnet18" if on_gpu else "resnet20"),
        epochs=epochs,
        batch_size=batch_size,
        global_batch_size=config.global_batch_size or batch_size * accum * world_size,
        amp=amp,
    )


def _dashed(word: str) -> str:
    """--use_syn=1 to --use-syn=1; the value keeps its underscores."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _number(low: float, high: float = float("inf"), *, above: bool = False) -> Any:
    """A parser for numbers in [low, high), or in (low, high) with `above`."""

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not (low < value if above else low <= value) or not value < high:
            bound = f"{'greater than' if above else 'at least'} {low:g}"
            bound += f" and less than {high:g}" if high < float("inf") else ""
            raise argparse.ArgumentTypeError(f"expected a number {bound}, not {text!r}")
        return value

    return number


def _every(text: str) -> Interval:
    try:
        return parse_interval(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected a whole number, 1 or more, of steps, or a time such as 30s, 10m or 1h, "
            f"not {text!r}"
        ) from None


def _path(text: str) -> str:
    """A path as written; an empty one is a shell variable that was not set."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, not an empty word")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = RankParser(
        prog="mpiddp train",
        description="Train a ResNet with DistributedDataParallel, as one rank of a job or alone. "
        "Dashes and underscores in options are the same.",
        allow_abbrev=False,
        formatter_class=DefaultsShown,
    )

    model = parser.add_argument_group("model")
    add = model.add_argument
    add("--arch", choices=ARCHS, help="default: resnet20 on CPUs, resnet18 on GPUs")
    add("--stem", choices=STEMS, default="auto", help="auto: cifar for images under 64 pixels")
    add("--weights", type=_path, metavar="FILE", help="start from a torchvision state_dict")

    data = parser.add_argument_group("data")
    add = data.add_argument
    add("--dataset", choices=DATASETS, default="cifar10", help="what to train on")
    add(
        "--data-dir",
        type=_path,
        metavar="DIR",
        help="default: $MPIDDP_DATA, else the user's cache folder",
    )
    add("--use-syn", action="store_true", help="random images and labels in the data set's shape")
    add("--image-size", type=whole(1, 1 << 14), help="pixels, of an image folder (default 224)")
    add("--num-workers", type=whole(0), default=4, help="processes per rank that decode images")
    add(
        "--cache",
        choices=("off", "ram"),
        default="off",
        help="keep an image folder's files in memory",
    )
    add("--batch-size", type=whole(1), help="per rank; default: 64 on CPUs, 256 on GPUs")
    add("--global-batch-size", type=whole(1), help="over all ranks, instead of --batch-size")
    add(
        "--uneven",
        action="store_true",
        help="allow a global batch that does not divide by the ranks",
    )
    add("--grad-accum-steps", type=whole(1), default=1, help="backward passes per step")
    add("--keep-tail", action="store_true", help="train on the last, smaller batch as well")

    schedule = parser.add_argument_group("schedule")
    add = schedule.add_argument
    add("--epochs", type=whole(1), help="default: 4 on CPUs, 30 on GPUs")
    add("--steps-per-epoch", type=whole(1), help="end every epoch after this many steps")
    add("--lr", type=_number(0, above=True), default=0.4, help="for a global batch of 256")
    add("--no-lr-scaling", dest="lr_scaling", action="store_false", help="take --lr as it is")
    add("--schedule", choices=SCHEDULES, default="one-cycle", help="of the learning rate")
    add("--warmup-epochs", type=_number(0), help="default: a quarter of all, 5 at most")
    add("--momentum", type=_number(0, 1), default=0.9, help="Nesterov's; 0 is plain SGD")
    add("--weight-decay", type=_number(0), default=5e-4, help="not on BatchNorm and biases")
    add("--label-smoothing", type=_number(0, 1), default=0.0, help="share of all other classes")

    engine = parser.add_argument_group("engine")
    add = engine.add_argument
    add("--backend", choices=("nccl", "gloo"), help="default: nccl with a GPU, else gloo")
    add("--timeout", type=_number(1, 1e6), default=600.0, help="seconds, of a collective")
    add("--amp", choices=AMP, default="auto", help="auto: bf16 where the device computes in it")
    add("--sync-bn", action="store_true", help="BatchNorm statistics over all ranks")
    add(
        "--channels-last",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="memory format NHWC",
    )
    add(
        "--compile",
        nargs="?",
        const="default",
        default="off",
        choices=COMPILE_MODES,
        help="torch.compile the model, in this mode",
    )
    add(
        "--bucket-mb", type=whole(1, 1 << 20), default=25, help="MiB of gradients in one all-reduce"
    )
    add(
        "--grad-compression",
        choices=COMPRESSIONS,
        default="off",
        help="what the ranks exchange instead of fp32 gradients; powersgd's memory is not saved",
    )
    add("--seed", type=whole(0, 2**32), default=0, help="of weights, order and augmentation")
    add("--deterministic", action="store_true", help="deterministic kernels, on GPUs too")

    run = parser.add_argument_group("run")
    add = run.add_argument
    add("--out", type=_path, metavar="DIR", help="the run's folder; default: runs/<time>-<arch>")
    add(
        "--resume",
        type=_path,
        default="auto",
        metavar="auto|never|PATH",
        help="which checkpoint to go on from",
    )
    add(
        "--go-on",
        action="store_true",
        help="with --resume never or PATH: once --out has a checkpoint of its own, from that",
    )
    add(
        "--save-every",
        type=_every,
        metavar="STEPS|TIME",
        help="20 steps, or 30s, 10m, 1h; default: once an epoch",
    )
    add("--keep", type=whole(2), default=2, metavar="N", help="checkpoints to keep")
    add(
        "--on-save-error",
        choices=("warn", "stop"),
        default="warn",
        help="what a full disk does to the run; the last save must succeed in any case",
    )
    add("--log-every", type=whole(1), default=50, metavar="STEPS", help="between two lines")
    add("--stop-at-step", type=whole(1), metavar="STEP", help="save there and leave, code 75")
    # torch.distributed.launch passes it to every script; the environment has it as well.
    add("--local-rank", type=whole(0), help=argparse.SUPPRESS)
    return parser


def out_dir(config: TrainConfig, time: str) -> Path:
    return Path(config.out) if config.out else Path("runs") / f"{time}-{config.arch}"


def resume_args(config: TrainConfig, out: Path) -> list[str]:
    """What the same command needs besides to go on where this run, in `out`, ends."""
    ours = [] if config.out else ["--out", str(out)]
    return ours if config.resume == "auto" or config.go_on else [*ours, "--go-on"]
