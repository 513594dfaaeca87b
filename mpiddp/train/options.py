"""The options of `mpiddp train`: each with its help, its values and whether a resume may change it.

`mpiddp.train.config` derives the configuration of a run from them. This module does not import torch,
so --help and option errors appear at once.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from mpiddp.arguments import DefaultsShown, JobHints, duration, whole
from mpiddp.runtime.log import RankParser
from mpiddp.text import Interval
from mpiddp.train.architectures import ARCHITECTURES
from mpiddp.train.contradictions import refuse_contradictions
from mpiddp.train.data.datasets import DATASETS
from mpiddp.train.option_parser import (
    add_options,
    interval,
    names,
    number,
    option,
    path,
    ranks,
    step_range,
)
from mpiddp.train.schedule import SCHEDULES
from mpiddp.train.sinks import SINKS

OPTIMIZERS = ("sgd", "muon")
COMPRESSIONS = ("off", "bf16", "fp16", "powersgd")
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune")  # torch.compile's own

CHECKED_STEPS = 10  # of --check-determinism


@dataclass(frozen=True)
class DeviceDefaults:
    """The defaults that depend on the kind of device."""

    arch: str
    batch_size: int  # images per rank and backward pass
    epochs: int
    low_res: float  # the share of the epochs that are trained on smaller images
    max_shift: int  # pixels


# Small and quick: a few epochs learn more from images that change little.
ON_CPU = DeviceDefaults("wide_resnet14_2", batch_size=64, epochs=7, low_res=0.5, max_shift=2)
ON_GPU = DeviceDefaults("resnet18", batch_size=256, epochs=30, low_res=0.0, max_shift=4)


# Why a resume may not change an option: it would change what the steps of the checkpoint have done.
_OTHER_TENSORS = "its tensors have other shapes"
_OTHER_IMAGES = "its steps have seen other images"
_OTHER_STEPS = "its steps and epochs are counted in other sizes"


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Every option of the command line, as the user wrote it. None: the user did not set it."""

    arch: str | None = option(
        "model",
        f"one of {', '.join(ARCHITECTURES)}; default: {ON_CPU.arch} on CPUs, {ON_GPU.arch} on GPUs",
        choices=ARCHITECTURES,
        metavar="ARCH",
        fixed=_OTHER_TENSORS,
    )
    stem: str = option(
        "model",
        "auto: imagenet for images of 64 pixels or more, else that of the architecture",
        choices=("auto", "imagenet", "cifar", "half"),
        default="auto",
        fixed=_OTHER_TENSORS,
    )
    weights: str | None = option(
        "model", "start from a torchvision state_dict", type=path, metavar="FILE"
    )

    dataset: str = option(
        "data", "data set", choices=tuple(DATASETS), default="cifar10", fixed=_OTHER_IMAGES
    )
    data_dir: str | None = option(
        "data",
        "folder of the data set (default: $MPIDDP_DATA, else ~/.cache/mpiddp)",
        type=path,
        metavar="DIR",
    )
    use_syn: bool = option(
        "data",
        "random images and labels in the data set's shape",
        action="store_true",
        fixed=_OTHER_IMAGES,
    )
    image_size: int | None = option(
        "data",
        "image size of an image folder, in pixels (default: 224)",
        type=whole(1, 1 << 14),
        fixed=_OTHER_IMAGES,
    )
    max_shift: int | None = option(
        "data",
        "shift images of CIFAR-10 and its like at random by up to PIXELS "
        f"(default: {ON_CPU.max_shift} on CPUs, {ON_GPU.max_shift} on GPUs)",
        type=whole(0, 17),
        metavar="PIXELS",
        noted=True,
    )
    num_workers: int = option(
        "data", "processes per rank that decode images", type=whole(0, 1025), default=4
    )
    batch_size: int | None = option(  # the largest of a rank's backward passes
        "data",
        "images per rank and backward pass "
        f"(default: {ON_CPU.batch_size} on CPUs, {ON_GPU.batch_size} on GPUs)",
        type=whole(1),
    )
    global_batch_size: int | None = option(
        "data",
        "images per step over all ranks; use instead of --batch-size",
        type=whole(1),
        fixed=_OTHER_STEPS,
    )
    uneven: bool = option(
        "data",
        "allow a global batch that is not divisible by the number of ranks",
        action="store_true",
    )
    grad_accum_steps: int = option("data", "backward passes per step", type=whole(1), default=1)
    keep_tail: bool = option(
        "data",
        "also train on the last, smaller batch of an epoch",
        action="store_true",
        fixed=_OTHER_STEPS,
    )

    epochs: int | None = option(
        "schedule",
        f"number of epochs (default: {ON_CPU.epochs} on CPUs, {ON_GPU.epochs} on GPUs)",
        type=whole(1),
        of_steps=False,
        noted=True,
    )
    steps_per_epoch: int | None = option(
        "schedule",
        "end every epoch after this many steps",
        type=whole(1),
        of_steps=False,
        fixed=_OTHER_STEPS,
    )
    low_res_epochs: int | None = option(
        "schedule",
        "train the first epochs on images of 3/4 of the height and width "
        f"(default: {ON_CPU.low_res:g} of the epochs on CPUs, none on GPUs)",
        type=whole(0),
        metavar="EPOCHS",
        noted=True,
    )
    lr: float = option(
        "schedule",
        "peak learning rate for a global batch of 256; scales with the batch",
        type=number(0, above=True),
        default=0.4,
        noted=True,
    )
    lr_scaling: bool = option(
        "schedule", "use --lr unscaled", flag="--no-lr-scaling", action="store_false", noted=True
    )
    schedule: str = option(
        "schedule",
        "learning rate schedule",
        choices=SCHEDULES,
        default="one-cycle",
        noted=True,
    )
    warmup_epochs: float | None = option(
        "schedule",
        "warm-up epochs (default: a quarter of all epochs, at most 5)",
        type=number(0),
        noted=True,
    )
    momentum: float = option(
        "schedule",
        "Nesterov momentum of SGD; 0 for none",
        type=number(0, 1),
        default=0.9,
        noted=True,
    )
    weight_decay: float = option(
        "schedule",
        "weight decay; not applied to BatchNorm and biases",
        type=number(0),
        default=5e-4,
        noted=True,
    )
    label_smoothing: float = option(
        "schedule",
        "probability spread over all classes",
        type=number(0, 1),
        default=0.0,
        noted=True,
    )
    optimizer: str | None = option(
        "schedule",
        "sgd, or muon: orthogonal updates of the convolutions (default: "
        f"muon for {ON_CPU.arch} on CPUs, else sgd)",
        choices=OPTIMIZERS,
        fixed="its optimizer has another state",
    )
    clip_grad_norm: float | None = option(
        "schedule",
        "scale the gradients down to this norm over all parameters (default: no limit)",
        type=number(0, above=True),
        metavar="NORM",
        noted=True,
    )

    backend: str | None = option(
        "engine",
        "communication backend (default: nccl with a GPU, else gloo)",
        choices=("nccl", "gloo"),
    )
    timeout: float = option(
        "engine", "time limit of a collective", type=duration, metavar="S", default=600.0
    )
    amp: str = option(
        "engine",
        "mixed precision; auto is bf16 if it is faster there",
        choices=("auto", "bf16", "fp16", "off"),
        default="auto",
        noted=True,
    )
    parallel: str = option(
        "engine",
        "ddp: a copy of the model on every rank; fsdp: shards of one copy over all ranks; "
        "hsdp: shards within a host, a copy on every host",
        choices=("ddp", "fsdp", "hsdp"),
        default="ddp",
    )
    sync_bn: bool = option(
        "engine", "compute BatchNorm statistics over all ranks", action="store_true", noted=True
    )
    channels_last: bool = option(
        "engine", "memory format NHWC", action=argparse.BooleanOptionalAction, default=True
    )
    compile: str = option(  # "off" or one of COMPILE_MODES
        "engine",
        "torch.compile the model, in this mode",
        nargs="?",
        const="default",
        default="off",
        choices=COMPILE_MODES,
    )
    bucket_mb: int = option(
        "engine", "MiB of gradients in one all-reduce", type=whole(1, 1 << 20), default=25
    )
    grad_compression: str = option(
        "engine",
        "compress gradients for all-reduce; checkpoints do not contain powersgd's error feedback",
        choices=COMPRESSIONS,
        default="off",
        noted=True,
    )
    seed: int = option(
        "engine",
        "seed of weights, sample order and augmentation",
        type=whole(0, 2**32),
        default=0,
        fixed="its steps have taken another order of images",
    )
    deterministic: bool = option(
        "engine", "deterministic kernels, on GPUs too", action="store_true"
    )

    out: str | None = option(
        "run", "folder of the run (default: runs/<time>-<arch>)", type=path, metavar="DIR"
    )
    resume: str = option(
        "run",
        "checkpoint to resume from; a PATH of another run counts until --out has a checkpoint",
        type=path,
        default="auto",
        metavar="auto|never|PATH",
        of_steps=False,
    )
    save_every: Interval | None = option(
        "run",
        "save every 20 (steps), or 30s, 10m, 1h (default: once per epoch)",
        type=interval,
        metavar="STEPS|TIME",
        of_steps=False,
    )
    keep: int = option(
        "run",
        "number of checkpoints to keep",
        type=whole(2),
        default=2,
        metavar="N",
        of_steps=False,
    )
    on_save_error: str = option(
        "run",
        "when a save fails: warn and continue, or stop; the last save must succeed either way",
        choices=("warn", "stop"),
        default="warn",
        of_steps=False,
    )
    log_every: int = option(
        "run", "steps between two log lines", type=whole(1), default=50, metavar="STEPS"
    )
    log_to: str | None = option(
        "run",
        f"also show the run in {', '.join(SINKS)}; separated by commas",
        type=names(SINKS),
        metavar="TOOLS",
        of_steps=False,
    )
    per_rank_log: bool = option(
        "run",
        'print "Local Rank: 0, Epoch: 0, Training ..." and the average step time on every rank',
        action="store_true",
        of_steps=False,
    )
    stop_at_step: int | None = option(
        "run",
        "save after this step and exit with code 75",
        type=whole(1),
        metavar="STEP",
        of_steps=False,
    )

    check_determinism: int | None = option(  # steps of each of its two runs
        "checks",
        "run the first steps twice, compare every tensor bit by bit, and exit; writes no files "
        f"(default: {CHECKED_STEPS} steps)",
        nargs="?",
        const=CHECKED_STEPS,
        type=whole(1),
        metavar="STEPS",
        of_steps=False,
    )
    profile: str | None = option(
        "checks",
        "trace these steps with torch.profiler: 10:15 records steps 10 to 15",
        type=step_range,
        metavar="FIRST:LAST",
        of_steps=False,
    )
    profile_ranks: str = option(
        "checks",
        "the ranks of --profile",
        type=ranks,
        default="0",
        metavar="0,5|all",
        of_steps=False,
    )
    check_divergence: int | None = option(
        "checks",
        "compare parameters and optimizer of all ranks every so many steps and before each save; "
        "ranks that differ end the job",
        type=whole(1),
        metavar="STEPS",
        of_steps=False,
    )


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
    add_options(parser, TrainOptions)
    # torch.distributed.launch passes it to every script. The value comes from the environment.
    parser.add_argument("--local-rank", type=whole(0), help=argparse.SUPPRESS)
    return parser


def parse(argv: list[str]) -> TrainOptions:
    """The options as written. --use_syn and --use-syn are the same option.

    Raises:
        UserError: unknown options, values out of range, or options that contradict each other.
    """
    given = option_parser().parse_args([_dashed(argument) for argument in argv])
    refuse_contradictions(given)
    values = vars(given)
    values.pop("local_rank")
    return TrainOptions(**values)


def check_options(argv: list[str]) -> JobHints:
    """Check the options before a job starts, and return what they request of the launcher.

    Raises:
        UserError: as `parse`.
    """
    options = parse(argv)
    return JobHints(options.backend or "auto", shows_all_ranks=options.per_rank_log)


def _dashed(argument: str) -> str:
    """--use_syn=1 to --use-syn=1; the value keeps its underscores."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value
