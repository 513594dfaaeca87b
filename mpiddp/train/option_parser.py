"""The parser of `mpiddp train`: its options, the values they may have, and their defaults."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from mpiddp.arguments import DefaultsShown, whole
from mpiddp.checkpoints.save_schedule import Interval, parse_interval
from mpiddp.runtime.log import RankParser
from mpiddp.text import shown
from mpiddp.train.architectures import ARCHITECTURES
from mpiddp.train.schedule import SCHEDULES

DATASETS = ("cifar10", "fashion-mnist", "image-folder")
STEMS = ("auto", "imagenet", "cifar")
AMP = ("auto", "bf16", "fp16", "off")
COMPRESSIONS = ("off", "bf16", "fp16", "powersgd")
PARALLEL = ("ddp", "fsdp", "hsdp")
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune")  # torch.compile's own

CHECKED_STEPS = 10  # of --check-determinism


@dataclass(frozen=True)
class DeviceDefaults:
    """The defaults of a run on one kind of device."""

    arch: str
    batch_size: int  # images per rank and backward pass
    epochs: int


ON_CPU = DeviceDefaults("resnet20", batch_size=64, epochs=4)  # small and quick
ON_GPU = DeviceDefaults("resnet18", batch_size=256, epochs=30)


def option_parser() -> argparse.ArgumentParser:
    """The parser of every option, with dashes."""
    parser = RankParser(
        prog="mpiddp train",
        usage="%(prog)s [options]",
        description="Train a ResNet, as one rank of a job or alone. "
        "Options accept dashes and underscores alike.",
        allow_abbrev=False,
        formatter_class=DefaultsShown,
    )
    _add_model_options(parser)
    _add_data_options(parser)
    _add_schedule_options(parser)
    _add_engine_options(parser)
    _add_run_options(parser)
    _add_check_options(parser)
    # torch.distributed.launch passes it to every script. The value comes from the environment.
    parser.add_argument("--local-rank", type=whole(0), help=argparse.SUPPRESS)
    return parser


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    add(
        "--arch",
        choices=ARCHITECTURES,
        metavar="ARCH",
        help=f"one of {', '.join(ARCHITECTURES)}; default: {ON_CPU.arch} on CPUs, {ON_GPU.arch} on "
        "GPUs",
    )
    add("--stem", choices=STEMS, default="auto", help="auto: cifar for images under 64 pixels")
    add("--weights", type=_path, metavar="FILE", help="start from a torchvision state_dict")


def _add_data_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("data").add_argument
    add("--dataset", choices=DATASETS, default="cifar10", help="data set")
    add(
        "--data-dir",
        type=_path,
        metavar="DIR",
        help="folder of the data set (default: $MPIDDP_DATA, else ~/.cache/mpiddp)",
    )
    add("--use-syn", action="store_true", help="random images and labels in the data set's shape")
    add(
        "--image-size",
        type=whole(1, 1 << 14),
        help="image size of an image folder, in pixels (default: 224)",
    )
    add(
        "--num-workers",
        type=whole(0, 1025),
        default=4,
        help="processes per rank that decode images",
    )
    add(
        "--cache",
        choices=("off", "ram"),
        default="off",
        help="keep an image folder's files in memory",
    )
    add(
        "--skip-broken",
        type=whole(0),
        default=0,
        metavar="K",
        help="replace up to K broken images of an image folder per rank by the next ones",
    )
    add(
        "--batch-size",
        type=whole(1),
        help="images per rank and backward pass "
        f"(default: {ON_CPU.batch_size} on CPUs, {ON_GPU.batch_size} on GPUs)",
    )
    add(
        "--global-batch-size",
        type=whole(1),
        help="images per step over all ranks; use instead of --batch-size",
    )
    add(
        "--uneven",
        action="store_true",
        help="allow a global batch that is not divisible by the number of ranks",
    )
    add("--grad-accum-steps", type=whole(1), default=1, help="backward passes per step")
    add(
        "--keep-tail", action="store_true", help="also train on the last, smaller batch of an epoch"
    )


def _add_schedule_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("schedule").add_argument
    add(
        "--epochs",
        type=whole(1),
        help=f"number of epochs (default: {ON_CPU.epochs} on CPUs, {ON_GPU.epochs} on GPUs)",
    )
    add("--steps-per-epoch", type=whole(1), help="end every epoch after this many steps")
    add(
        "--lr",
        type=_number(0, above=True),
        default=0.4,
        help="peak learning rate for a global batch of 256; scales with the batch",
    )
    add("--no-lr-scaling", dest="lr_scaling", action="store_false", help="use --lr unscaled")
    add("--schedule", choices=SCHEDULES, default="one-cycle", help="learning rate schedule")
    add(
        "--warmup-epochs",
        type=_number(0),
        help="warm-up epochs (default: a quarter of all epochs, at most 5)",
    )
    add("--momentum", type=_number(0, 1), default=0.9, help="Nesterov momentum; 0 is plain SGD")
    add(
        "--weight-decay",
        type=_number(0),
        default=5e-4,
        help="weight decay; not applied to BatchNorm and biases",
    )
    add(
        "--label-smoothing",
        type=_number(0, 1),
        default=0.0,
        help="probability spread over all classes",
    )
    add(
        "--clip-grad-norm",
        type=_number(0, above=True),
        metavar="NORM",
        help="scale the gradients down to this norm over all parameters (default: no limit)",
    )


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("engine").add_argument
    add(
        "--backend",
        choices=("nccl", "gloo"),
        help="communication backend (default: nccl with a GPU, else gloo)",
    )
    add(
        "--timeout",
        type=_number(1, 1e6),
        default=600.0,
        help="time limit of a collective, in seconds",
    )
    add(
        "--amp",
        choices=AMP,
        default="auto",
        help="mixed precision; auto is bf16 if it is faster there",
    )
    add(
        "--parallel",
        choices=PARALLEL,
        default="ddp",
        help="ddp: a copy of the model on every rank; fsdp: shards of one copy over all ranks; "
        "hsdp: shards within a host, a copy on every host",
    )
    add(
        "--sync-bn",
        action="store_true",
        help="compute BatchNorm statistics over all ranks",
    )
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
        help="compress gradients for all-reduce; checkpoints do not contain powersgd's error feedback",
    )
    add(
        "--seed",
        type=whole(0, 2**32),
        default=0,
        help="seed of weights, sample order and augmentation",
    )
    add("--deterministic", action="store_true", help="deterministic kernels, on GPUs too")


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("run").add_argument
    add(
        "--out",
        type=_path,
        metavar="DIR",
        help="folder of the run (default: runs/<time>-<arch>)",
    )
    add(
        "--resume",
        type=_path,
        default="auto",
        metavar="auto|never|PATH",
        help="checkpoint to resume from",
    )
    add(
        "--go-on",
        action="store_true",
        help="with --resume never or PATH: resume from --out's own newest checkpoint once it has one",
    )
    add(
        "--save-every",
        type=_interval,
        metavar="STEPS|TIME",
        help="save every 20 (steps), or 30s, 10m, 1h (default: once per epoch)",
    )
    add("--keep", type=whole(2), default=2, metavar="N", help="number of checkpoints to keep")
    add(
        "--on-save-error",
        choices=("warn", "stop"),
        default="warn",
        help="when a save fails: warn and continue, or stop; the last save must succeed either way",
    )
    add(
        "--log-every",
        type=whole(1),
        default=50,
        metavar="STEPS",
        help="steps between two log lines",
    )
    add(
        "--per-rank-log",
        action="store_true",
        help='print "Local Rank: 0, Epoch: 0, Training ..." and the average step time on every rank',
    )
    add(
        "--stop-at-step",
        type=whole(1),
        metavar="STEP",
        help="save after this step and exit with code 75",
    )


def _add_check_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("checks").add_argument
    add(
        "--check-determinism",
        nargs="?",
        const=CHECKED_STEPS,
        type=whole(1),
        metavar="STEPS",
        help="run the first steps twice, compare every tensor bit by bit, and exit; writes no files "
        f"(default: {CHECKED_STEPS} steps)",
    )
    add(
        "--check-divergence",
        type=whole(1),
        metavar="STEPS",
        help="compare parameters and optimizer of all ranks every so many steps and before each save; "
        "ranks that differ end the job",
    )


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
            raise argparse.ArgumentTypeError(f"expected a number {bound}, not {shown(text)!r}")
        return value

    return number


def _interval(text: str) -> Interval:
    try:
        return parse_interval(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            "expected a number of steps (1 or more) or a time such as 30s, 10m or 1h, "
            f"not {shown(text)!r}"
        ) from None


def _path(text: str) -> str:
    """A path as written. An empty one usually comes from a shell variable that is not set."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, not an empty string")
    return text
